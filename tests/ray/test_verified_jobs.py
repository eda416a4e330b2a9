"""Jobs whose engine has a wrong tensor end before the step that would train on its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plugin.errors import FindingError
from plugin.observe.run_record import read_run
from tests.planted_faults import FAULTS
from tests.ray.casualties import AfterSteps, kill_one, logged_steps
from tests.ray.small_jobs import run_small

pytestmark = pytest.mark.timeout(600)


def test_an_engine_that_comes_back_with_a_wrong_tensor_is_stopped_before_the_next_step(
    two_nodes: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with (
        AfterSteps(run_dir, 2, lambda: kill_one("EngineActor")) as killed,
        pytest.raises(FindingError, match="engine 0 does not compute with the trainer's weights"),
    ):
        run_small(
            *(two_nodes, run_dir),
            num_nodes=1,
            num_rollouts=2000,
            rollout_engine="tests.planted_faults:make_faulty_replacement",
            # A random model gives every token the same probability; half its logits do not.
            rollout_temperature=0.02,
        )
    assert killed.done
    steps, [finding] = logged_steps(run_dir / "metrics.jsonl"), read_run(run_dir).findings
    assert finding["step"] == steps and finding["detector"] == "weight_verification"


#: Not visible in a job's random model: its norms are 1 anyway, and it is nearly as good rounded. The
#: unit tests of the verification and tests/real find both.
HIDDEN_BY_RANDOM_WEIGHTS = {"default_norms", "rounded_weights"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(set(FAULTS) - HIDDEN_BY_RANDOM_WEIGHTS))
def test_no_job_trains_a_step_on_an_engine_with_a_wrong_tensor(
    kind: str, two_nodes: str, tmp_path: Path
) -> None:
    with pytest.raises(FindingError, match="does not compute with the trainer's weights"):
        run_small(
            *(two_nodes, tmp_path / "run"),
            num_nodes=1,
            num_rollouts=2,
            rollout_engine=f"tests.planted_faults:make_{kind}",
            rollout_temperature=0.02,
        )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


#: Settings, and how many answers to the probe are judged in three rollouts.
HEALTHY: list[tuple[dict[str, Any], int]] = [
    # Also before the evaluation after the last one.
    ({"weight_sync": "object-store", "verify_weights": "every:1", "eval_data": "held:4"}, 4),
    ({"colocate": True, "verify_weights": "every:1"}, 3),
    ({"weight_sync": "delta", "verify_weights": "every:1"}, 3),
    ({"async_rollouts": True, "use_tis": True, "partial_rollouts": True}, 1),
    ({"num_rollout_engines": 2, "rollout_dtype": "bfloat16", "verify_weights": "every:2"}, 4),
    ({"rollout_quantization": "int8"}, 1),
    ({"train_dtype": "bfloat16", "rollout_dtype": "bfloat16"}, 1),
    ({"embedded_model": "qwen3_moe", "use_rollout_routing_replay": "ids"}, 1),
    ({"embedded_model": "qwen3_moe", "num_gpus_per_node": 2, "expert_model_parallel_size": 2}, 1),
    ({"lora_rank": 4, "lora_sync": "adapter"}, 1),
    ({"num_gpus_per_node": 2, "pipeline_model_parallel_size": 2}, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "times"), HEALTHY)
def test_healthy_jobs_are_verified_and_go_on(
    settings: dict[str, Any],
    times: int,
    two_nodes: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_small(two_nodes, tmp_path / "run", num_nodes=1, **settings)
    printed = capsys.readouterr().out
    assert printed.count("computes with the trainer's weights") == times, printed
