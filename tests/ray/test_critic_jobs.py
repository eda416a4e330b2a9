"""Jobs with a value model."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugin.observe.run_record import read_run
from tests.ray.small_jobs import run_small

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CRITIC = {
    "num_nodes": 1,
    "num_gpus_per_node": 2,
    "advantage_estimator": "gae",
    "lambd": 0.9,
    "critic_lr": 3e-3,
    "critic_lr_warmup_steps": 3,
    # enough that some response of every mini-batch is rewarded
    "rollout_batch_size": 64,
    "global_batch_size": 128,
    "save_interval": 2,
}


def test_a_job_with_a_critic_resumes_exactly(two_nodes: str, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_small(two_nodes, whole, **CRITIC, num_rollouts=4)
    run_small(two_nodes, parts, **CRITIC, num_rollouts=2)
    assert (parts / "checkpoints" / "step_0000004" / "critic" / "metadata.json").is_file()
    assert not (parts / "checkpoints" / ".critic").exists()
    run_small(two_nodes, parts, **CRITIC, num_rollouts=4, resume=True)
    mine, theirs = read_run(parts).steps, read_run(whole).steps
    names = ("loss", "grad_norm", "reward", "critic/loss", "critic/explained_variance")
    for name in (*names, "critic/grad_norm", "critic/value", "critic/lr"):
        assert [step[name] for step in mine] == [step[name] for step in theirs], name
    # two mini-batches per rollout, three of warm-up
    rates = [step["critic/lr"] for step in theirs]
    assert rates == pytest.approx([1e-3, 2e-3, *[3e-3] * 6])
    assert theirs[0]["critic/value"] == 0.0 and theirs[-1]["critic/value"] != 0.0


def test_the_policy_waits_for_the_critic(two_nodes: str, tmp_path: Path) -> None:
    settings = CRITIC | {"global_batch_size": None, "num_critic_only_rollouts": 2}
    run_small(two_nodes, tmp_path / "run", **settings, num_rollouts=3)
    assert [step["lr"] for step in read_run(tmp_path / "run").steps] == [0.0, 0.0, 1e-3]
