"""Jobs whose old log-probs are the trainer's at the version that sampled: --train-log-probs engine-version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ray.casualties import AfterSteps, kill_one
from tests.ray.small_jobs import run_small

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STALE: dict[str, Any] = {
    "train_log_probs": "engine-version",
    "async_rollouts": True,
    "max_weight_staleness": 2,
    "use_tis": True,
    "verify_weights": "off",
}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"num_nodes": 1, "tensor_model_parallel_size": 2}, id="TP2"),
        pytest.param(
            {
                "num_nodes": 2,
                "partial_rollouts": True,
                "global_batch_size": 8,
                "num_rollouts": 5,
                "max_response_length": 12,
                # One whose responses new weights interrupt.
                "rollout_engine": "tests.ray.test_partial_rollouts:make_slow_engine",
            },
            id="DP2, partial",
        ),
        pytest.param({"num_nodes": 1, "lora_rank": 4, "lora_alpha": 8.0, "lr": 1e-2}, id="LoRA"),
    ],
)
def test_stale_tokens_differ_from_the_engine_by_numerics_alone(
    two_nodes: str, tmp_path: Path, settings: dict[str, Any]
) -> None:
    result = run_small(
        two_nodes,
        tmp_path / "run",
        learns_every_step=False,
        **{**STALE, "num_rollouts": 6, **settings},
    )
    stale = [line for line in result.history if line["staleness_max"] >= 1]
    assert stale
    for line in result.history:
        # Engine and trainer compute in float32: with the weights of one version they agree.
        assert line["train_rollout_logprob_abs_diff"] < 2e-5
        assert line["tis_abs"] < 2e-5 and line["mismatch/ratio_max"] < 1.001
        assert line.get("lost_version_share", 0.0) == 0
    # What the updates since changed is in the ratio of the loss.
    assert max(line["mismatch/cur/k3"] for line in stale) > 1e-6
    assert max(abs(line["ppo_kl"]) for line in stale) > 1e-5
    if "partial_rollouts" in settings:
        assert max(line["interrupted_share"] for line in result.history) > 0


def test_after_a_restart_lost_versions_are_counted_and_later_ones_are_kept(
    two_nodes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    with AfterSteps(run_dir, 6, lambda: kill_one("TrainerRank")) as killed:
        result = run_small(
            two_nodes, run_dir, **STALE, num_nodes=1, num_rollouts=14, save_interval=2,
            learns_every_step=False,
        )  # fmt: skip
    assert killed.done and result.history[-1]["trainer_restarts"] == 1
    lost = [line["step"] for line in result.history if line.get("lost_version_share", 0) > 0]
    restarted = next(line["step"] for line in result.history if line["trainer_restarts"])
    assert lost and min(lost) >= restarted
    assert result.history[-1]["staleness_max"] >= 1
    assert result.history[-1]["lost_version_share"] == 0
    assert result.history[-1]["train_rollout_logprob_abs_diff"] < 2e-5
    assert "were sampled by weights from before a restart" in "".join(capsys.readouterr())
    # A resumed run goes on, too.
    again = run_small(
        two_nodes, run_dir, **STALE, num_nodes=1, num_rollouts=17, save_interval=2, resume=True,
        learns_every_step=False,
    )  # fmt: skip
    assert len(again.history) == 17 and again.history[-1]["lost_version_share"] == 0
