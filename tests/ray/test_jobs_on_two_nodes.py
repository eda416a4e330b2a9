"""Whole jobs, three steps each, on a two-node cluster: real ranks, real engine, nothing replaced."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from plugin.batch_types import RolloutBatch
from plugin.cluster.array_transport import fetched
from plugin.controller import training_loop
from plugin.controller.batch import prepare_batch
from plugin.controller.job import JobResult
from plugin.errors import ClusterError
from plugin.observe.run_record import read_run
from tests.ray.small_jobs import run_small
from tests.unit.observe.test_html_report import drawn_metrics

OWN_PARTS = """
import warnings
import torch
from plugin.engines.transformers.engine import TransformersEngine

class Engine(TransformersEngine):
    def load_weights(self, version, bucket, *, last):
        warnings.warn("the engine loads weights")
        super().load_weights(version, bucket, last=last)

def engine(config, hf_config, name):
    return Engine(hf_config, name=name)

def estimator(rewards, group_index, loss_masks, config):
    return [2 * r * torch.ones(len(mask)) for r, mask in zip(rewards - rewards.mean(), loss_masks)]

def halve(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_rank() == 1:
        warnings.warn("the hook has doubts")
    ratio = torch.cat([(t - r).exp() for t, r in zip(train_log_probs, rollout_log_probs)])
    return pg_loss * 0.5, loss_masks, {"own_ratio": ratio}
"""


@dataclass(frozen=True)
class Told:
    """A finished job and what it wrote to the terminal's error stream."""

    result: JobResult
    lines: list[str]


@pytest.fixture(scope="module")
def own_job(two_nodes: str, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """A job with the user's own engine, estimator and hook, and with every regularizer drawn."""
    directory = tmp_path_factory.mktemp("own")
    file = directory / "parts.py"
    file.write_text(OWN_PARTS)
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        result = run_small(
            two_nodes,
            directory / "run",
            tensor_model_parallel_size=2,
            rollout_engine=f"{file}:engine",
            advantage_estimator=f"{file}:estimator",
            use_tis=True,
            custom_tis_function_path=f"{file}:halve,plugin.ppo_utils.icepop_function",
            use_rollout_kl_loss=True,
            rollout_kl_loss_coef=0.1,
            entropy_coef=0.001,
        )
    return Told(result, errors.getvalue().splitlines())


def test_every_metric_that_the_report_draws_is_recorded_by_a_job(own_job: Told) -> None:
    of_teachers = {"teacher_kl", "distill_kl"}
    for step in read_run(own_job.result.run_dir).steps:
        assert drawn_metrics() - step.keys() == of_teachers


def test_tensor_parallel_across_nodes_with_the_users_own_hook_and_rollout_kl(
    own_job: Told,
) -> None:
    for line in own_job.result.history:
        # Engine and trainer run the same float32 weights: the ratio is 1 up to rounding.
        assert line["own_ratio"] == pytest.approx(1.0, abs=1e-4)
        assert 0 <= line["rollout_kl"] < 1e-6
        assert line["staleness"] == 0


def test_an_engine_and_an_estimator_by_path_train_and_warnings_reach_the_driver_once(
    own_job: Told,
) -> None:
    assert [line for line in own_job.lines if "the engine loads" in line] == [
        "warning: engine 0: the engine loads weights"
    ]
    [of_the_rank] = [line for line in own_job.lines if "the hook has doubts" in line]
    assert of_the_rank.startswith("warning: rank 1 on ")


def test_pipeline_parallel_across_nodes_with_asynchronous_rollouts(
    two_nodes: str, tmp_path: Path
) -> None:
    result = run_small(
        two_nodes,
        tmp_path / "run",
        pipeline_model_parallel_size=2,
        policy_loss="icepop",
        async_rollouts=True,
        max_weight_staleness=1,
        num_rollouts=4,
        rollout_quantization="int8",
        eval_data="held:6",
        eval_interval=1,
        keep_best=True,
        dynamic_sampling=True,
        save_hf_interval=3,
    )
    # Each evaluation is of the weights after its rollout, and no prompt of training is missing.
    assert [line["weight_version"] for line in result.evaluations] == [0, 1, 2, 3, 4]
    assert all(line["eval/held/prompts"] == 6 for line in result.evaluations)
    trained = result.evaluations[1:]
    best = max(trained, key=lambda line: (line["eval/held/mean"], -line["step"]))
    assert result.best_checkpoint is not None
    assert result.best_checkpoint.name == f"step_{best['step']:07d}"
    models = [path.name for path in (tmp_path / "run" / "models").iterdir()]
    assert models == ["step_0000003"]
    for line in result.history:
        dropped = sum(line[f"dropped_{cause}"] for cause in ("stale", "failed", "uniform"))
        known = line["prompts_trained"] + dropped + line["prompts_under_way"]
        assert line["prompts_issued"] == known
    assert result.history[0]["staleness"] == 0
    assert max(line["staleness_max"] for line in result.history) == 1
    for line in result.history:
        assert line["mismatch_kl"] > 0
        assert "is_masked" in line
        assert line["prompts_issued"] >= line["prompts_trained"]


@pytest.mark.slow
@pytest.mark.parametrize("old", ["recompute", "approximate"])
def test_mini_batches_and_epochs_of_an_asynchronous_job(
    two_nodes: str, tmp_path: Path, old: str
) -> None:
    # 4 x 3 responses in mini-batches of 6: 2 mini-batches x 2 epochs x 4 rollouts = 16 steps
    result = run_small(
        two_nodes,
        tmp_path / "run",
        num_nodes=1,
        num_rollouts=4,
        rollout_batch_size=4,
        n_samples_per_prompt=3,
        global_batch_size=6,
        num_updates_per_rollout=2,
        # Its baseline is the rollout's, so that no mini-batch is without a gradient.
        advantage_estimator="reinforce_plus_plus",
        async_rollouts=True,
        use_tis=True,
        train_log_probs=old,
    )
    places = [
        (line["rollout"], line["update_epoch"], line["mini_batch"]) for line in result.history
    ]
    assert places == [(r, e, m) for r in range(4) for e in range(2) for m in range(2)]
    assert all(abs(line["ppo_kl"]) > 1e-7 for line in result.history if line["update_epoch"])
    saved = [line["step"] for line in result.history if "seconds_log_probs_saved" in line]
    assert saved == ([9, 13] if old == "approximate" else [])
    # On the second rollout the approximation is compared with a pass; its first update is exact.
    errors = [line.get("old_log_prob_error") for line in result.history]
    assert [e is not None for e in errors] == [
        old == "approximate" and 4 <= n < 8 for n in range(16)
    ]
    if old == "approximate":
        assert errors[4] < 1e-5 < min(errors[5:8])


@pytest.mark.slow
def test_data_parallel_with_uneven_batches_two_updates_and_a_reference(
    two_nodes: str, tmp_path: Path
) -> None:
    # 5 x 3 samples on 2 ranks under a budget of 24 tokens: shares differ, one rank pads.
    result = run_small(
        two_nodes,
        tmp_path / "run",
        num_gpus_per_node=1,
        rollout_batch_size=5,
        n_samples_per_prompt=3,
        max_tokens_per_gpu=24,
        num_updates_per_rollout=2,
        use_tis=True,
        use_kl_loss=True,
        kl_loss_coef=0.01,
        kl_loss_type="k3",
    )
    first, second = result.history[0], result.history[1]
    assert first["ppo_kl"] == pytest.approx(0, abs=1e-6)
    # The second update on the same rollout starts from other weights.
    assert second["rollout"] == first["rollout"] and abs(second["ppo_kl"]) > 1e-6
    assert first["kl_loss"] == pytest.approx(0, abs=1e-6) and second["kl_loss"] > 0
    assert first["num_microbatches"] > 2


def test_a_moe_job_repeats_the_routes_of_the_engine_it_shares_its_slot_with(
    two_nodes: str, tmp_path: Path
) -> None:
    result = run_small(
        two_nodes,
        tmp_path / "run",
        num_nodes=1,
        embedded_model="qwen3_moe",
        use_rollout_routing_replay="ids+weights",
        router_gradient="keep",
        get_mismatch_metrics=True,
        colocate=True,
    )
    assert all(line["mismatch_kl"] < 1e-6 for line in result.history)
    assert all(line["replay/agreement"] > 0.99 for line in result.history)
    assert not (tmp_path / "run" / "findings.jsonl").exists()


@pytest.mark.slow
def test_a_moe_job_without_replay_notices_that_the_engine_routes_differently(
    two_nodes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"num_nodes": 1, "embedded_model": "qwen3_moe", "detect_routing": True}
    run_small(two_nodes, tmp_path / "same", **settings)
    assert not (tmp_path / "same" / "findings.jsonl").exists()

    def with_reversed_layers(*arguments: Any) -> RolloutBatch:
        batch = fetched(prepare_batch(*arguments))
        routes = batch.columns["rollout_routed_experts"]
        return batch.with_column("rollout_routed_experts", [route.flip(1) for route in routes])

    monkeypatch.setattr(training_loop, "prepare_batch", with_reversed_layers)
    run_small(two_nodes, tmp_path / "reversed", **settings)
    lines = (tmp_path / "reversed" / "findings.jsonl").read_text().splitlines()
    findings = [json.loads(line) for line in lines]
    assert [finding["detector"] for finding in findings] == ["routing"] * 3
    assert "another order" in findings[0]["likely_cause"]


def test_a_cluster_that_is_too_small_is_refused_at_once(two_nodes: str, tmp_path: Path) -> None:
    with pytest.raises(
        ClusterError, match=r"has 2 nodes \([23] CPU, [23] CPU\); the job needs 2 x \(4 CPU\)"
    ):
        run_small(two_nodes, tmp_path / "run", tensor_model_parallel_size=8)


@pytest.mark.slow
def test_two_jobs_in_one_cluster_train_as_each_alone(two_nodes: str, tmp_path: Path) -> None:
    flags = {"num_nodes": 1, "num_rollouts": 4, "rollout_batch_size": 4, "n_samples_per_prompt": 4}
    options = [text for n, v in flags.items() for text in (f"--{n.replace('_', '-')}", str(v))]
    command = [sys.executable, "-m", "plugin", "train", "--address", two_nodes, *options]
    runs = [tmp_path / name for name in ("one", "other")]
    jobs = [subprocess.Popen([*command, "--run-dir", str(run)]) for run in runs]
    assert [job.wait(timeout=280) for job in jobs] == [0, 0]
    one, other = (read_run(run).steps for run in runs)
    assert len(one) == 4
    for name in ("loss", "grad_norm", "reward", "mismatch_kl"):
        assert [step[name] for step in one] == [step[name] for step in other], name
