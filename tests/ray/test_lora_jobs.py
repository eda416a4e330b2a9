"""Jobs that train adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from plugin.cluster.model_source import policy_source
from plugin.commands.export import export
from plugin.config import JobConfig
from plugin.observe.run_record import read_run
from tests.ray.small_jobs import run_small
from tests.ray.tokenizer_files import save_character_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LORA: dict[str, Any] = {
    "num_nodes": 1,
    "lora_rank": 4,
    "rollout_batch_size": 16,
    "n_samples_per_prompt": 8,
    "lr": 1e-2,
}
STEP = ("loss", "grad_norm", "reward")


def steps(run_dir: Path, *names: str) -> list[list[float]]:
    return [[step[name] for name in names] for step in read_run(run_dir).steps]


def test_adapters_are_synced_by_themselves_and_the_job_resumes_exactly(
    two_nodes: str, tmp_path: Path
) -> None:
    settings = LORA | {"lora_sync": "adapter", "save_interval": 2}
    settings |= {"num_gpus_per_node": 2, "pipeline_model_parallel_size": 2}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_small(two_nodes, whole, **settings, num_rollouts=4)
    run_small(two_nodes, parts, **settings, num_rollouts=2)
    run_small(two_nodes, parts, **settings, num_rollouts=4, resume=True)
    assert steps(parts, *STEP) == steps(whole, *STEP)
    first, *later = [step["weight_sync_bytes"] for step in read_run(whole).steps]
    export(whole, tmp_path / "adapter")
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    size = sum(tensor.nbytes for tensor in adapter.values())
    assert set(later) == {size} and first > 4 * size


def test_merged_and_adapter_sync_train_alike_and_the_reference_is_the_base(
    two_nodes: str, tmp_path: Path
) -> None:
    settings = LORA | {"use_kl_loss": True, "kl_loss_coef": 0.1}
    for way in ("merged", "adapter"):
        run_small(two_nodes, tmp_path / way, **settings, lora_sync=way)
    merged, adapter = (read_run(tmp_path / way).steps for way in ("merged", "adapter"))
    # the first step has no adapters yet, and its reference is the policy itself
    assert merged[0]["kl_loss"] == 0.0
    assert merged[-1]["kl_loss"] != 0.0
    for mine, theirs in zip(merged, adapter, strict=True):
        assert mine["mismatch_kl"] < 1e-8 and theirs["mismatch_kl"] < 1e-8
        for name in STEP:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-2, abs=1e-3)


def test_a_job_with_experts_exports_its_adapter_and_the_merged_model(
    two_nodes: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = LORA | {"embedded_model": "qwen3_moe", "save_at_end": True, "num_gpus_per_node": 2}
    run_small(two_nodes, run, **settings, expert_model_parallel_size=2, save_hf=True)
    export(run, tmp_path / "adapter")
    export(run, tmp_path / "merged", merge=True)
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"]) == (4, 32)
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any(".experts.3.down_proj.lora_B" in name for name in adapter)
    [file] = (tmp_path / "merged").glob("*.safetensors")
    [saved] = (run / "model").glob("*.safetensors")
    merged, of_job = load_file(file), load_file(saved)
    for name, tensor in merged.items():
        assert (tensor - of_job[name]).abs().max() < 1e-6, name


def highest_reward(head: Tensor, norm: Tensor) -> float:
    """No hidden state makes the built-in task's reward larger than this with these two weights.

    A hidden state behind the norm is `norm * h` with |h| = sqrt(width), so a head gives every id a largest probability.
    The reward is the share of right tokens, three digits and the end of the text.
    """
    head, norm = head.double(), norm.double()
    states = head.clone().requires_grad_()
    optimizer = torch.optim.Adam([states], lr=0.02)
    for _ in range(2000):
        hidden = norm * states / states.norm(dim=1, keepdim=True) * head.shape[1] ** 0.5
        log_probs = (hidden @ head.t()).log_softmax(1).diagonal()
        optimizer.zero_grad()
        (-log_probs.sum()).backward()
        optimizer.step()
    largest = log_probs.detach().exp()
    return float(3 * largest[:10].mean() + largest[-1]) / 4


TASK = """
from plugin.tasks.copy_digits import CopyDigitsTask


def make(config, tokenizer):
    return CopyDigitsTask(tokenizer, seed=config.seed)
"""


def test_adapters_learn_the_built_in_task_as_far_as_the_lm_head_lets_them(
    two_nodes: str, tmp_path: Path
) -> None:
    sizes = {"rollout_batch_size": 64, "max_response_length": 8, "max_prompt_length": 32}
    start = policy_source(JobConfig.from_sources({})).random_weights()
    of_random = highest_reward(start["lm_head.weight"], start["model.norm.weight"])
    assert of_random == pytest.approx(0.637, abs=0.003)
    # All weights are trained until the head allows more than that, then adapters alone.
    whole = LORA | sizes | {"lora_rank": 0, "lr": 3e-3, "save_hf": True}
    run_small(two_nodes, tmp_path / "whole", **whole, num_rollouts=25)
    base = tmp_path / "whole" / "model"
    save_character_tokenizer(base)
    [file] = base.glob("*.safetensors")
    trained = load_file(file)
    limit = highest_reward(trained["lm_head.weight"], trained["model.norm.weight"])
    (tmp_path / "task.py").write_text(TASK)
    adapters = LORA | sizes | {"lora_rank": 16, "lr": 4e-3, "hf_checkpoint": str(base)}
    adapters |= {"task_path": f"{tmp_path / 'task.py'}:make"}
    run_small(two_nodes, tmp_path / "run", **adapters, num_rollouts=30)
    rewards = [step["reward"] for step in read_run(tmp_path / "run").steps]
    assert rewards[0] < of_random < sum(rewards[-5:]) / 5 < limit, (rewards, of_random, limit)


def test_adapters_learn_the_built_in_task_at_a_low_temperature_while_entropy_lasts(
    two_nodes: str, tmp_path: Path
) -> None:
    # Without the entropy term the policy of either kind is nearly deterministic by step 20, at a reward of 0.4 to 0.5.
    sizes = {"rollout_batch_size": 64, "max_response_length": 8, "lora_rank": 16, "lr": 4e-3}
    settings = LORA | sizes | {"rollout_temperature": 0.25, "entropy_coef": 0.1}
    run_small(two_nodes, tmp_path / "run", **settings, num_rollouts=50)
    history = read_run(tmp_path / "run").steps
    assert sum(step["reward"] for step in history[-5:]) / 5 > 0.9
    assert max(step["mismatch_kl"] for step in history) < 1e-8
