"""Flags that save memory or waiting compute the same step: recomputed parts of layers, an optimizer in host memory, rows of
one length."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.config import TrainerConfig
from plugin.megatron_backend.model.builder import unwrap
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.trainer import MegatronTrainer
from tests.parallel import replay_jobs, tiny_models
from tests.parallel.rank_pool import RankPool
from tests.parallel.test_checkpointing import DENSE, resume_train, train_save_train
from tests.parallel.training_jobs import (
    SMOOTH_ADAM,
    Case,
    Layout,
    RunRanks,
    differences,
    exported,
    run_cases,
    uneven_batch,
)

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
SELECTIVE = {"recompute_granularity": "selective"}
SHARDED = {"train_dtype": "bfloat16", "use_distributed_optimizer": True}
OFFLOADED = {**SHARDED, "optimizer_cpu_offload": True}

CASES: dict[str, tuple[Layout, Case]] = {
    "parts of dense layers": (
        Layout(2, TP2),
        Case(
            settings={
                **SELECTIVE,
                "recompute_modules": "core_attn,layernorm,mlp",
                "sequence_parallel": True,
                "max_tokens_per_gpu": 24,
            }
        ),
    ),
    "parts of MoE layers": (
        Layout(2, EP2),
        Case("qwen3_moe", {**SELECTIVE, "recompute_modules": "layernorm, moe"}),
    ),
    "rows of one length": (
        Layout(2, PP2),
        Case(settings={"variable_seq_lengths": False, "max_tokens_per_gpu": 24}),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_one_process_without_the_flag(run_ranks: RunRanks, name: str) -> None:
    layout, case = CASES[name]
    expected = run_cases(run_ranks, Layout(), {"": case.uncut()})[""]
    found = run_cases(run_ranks, layout, {"": case})[""]
    assert differences(found, expected, case.family) == []


def calls_of_a_step(
    groups: ParallelGroups, hf_config: Any, settings: dict[str, Any]
) -> tuple[Counter[str], dict[str, float]]:
    """How often the modules of the last layer were called in a training step; its metrics."""
    config = TrainerConfig(**SMOOTH_ADAM, micro_batch_size=64, **settings)
    trainer = MegatronTrainer(config, hf_config, groups)
    calls: Counter[str] = Counter()
    for name, module in unwrap(trainer.chunks[0]).decoder.layers[-1].named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
    batch = uneven_batch()
    batch = batch.with_column("log_probs", batch.columns["rollout_log_probs"])
    return calls, trainer.train_step(batch).metrics


PARTS = [
    ("qwen3", "core_attn", "self_attention.core_attention"),
    ("qwen3", "layernorm", "input_layernorm"),
    ("qwen3", "mlp", "mlp.linear_fc1"),
    ("qwen3_moe", "moe", "mlp.router"),
    ("deepseek_v3", "mla_up_proj", "self_attention.linear_kv_up_proj"),
    ("deepseek_v3", "shared_experts", "mlp.shared_experts.linear_fc1"),
]


@pytest.mark.parametrize(("family", "part", "module"), PARTS)
def test_a_part_is_computed_a_second_time_and_the_step_stays(
    run_ranks: RunRanks, family: str, part: str, module: str
) -> None:
    hf_config = tiny_models.ALL_FAMILIES[family]()
    [(plain, expected)] = run_ranks(calls_of_a_step, 1, hf_config, {})
    settings = {**SELECTIVE, "recompute_modules": part}
    [(calls, metrics)] = run_ranks(calls_of_a_step, 1, hf_config, settings)
    assert calls[module] == 2 * plain[module] > 0
    assert metrics == pytest.approx(expected, rel=1e-6)


def test_replayed_routes_hold_in_recomputed_layers(run_ranks: RunRanks) -> None:
    model = tiny_models.tiny_qwen3_moe(mlp_only_layers=[0, 1])
    weights = tiny_models.hf_state_dict(model, seed=3)
    replay = {"use_rollout_routing_replay": True}
    settings = {**replay, **SELECTIVE, "recompute_modules": "moe", **PP2}
    job = replay_jobs.train_with_replay
    [expected] = run_ranks(job, 1, model, weights, replay)
    results = run_ranks(job, 2, model, weights, settings, **PP2)
    for mine, theirs in zip(results[0]["metrics"], expected["metrics"], strict=True):
        for name in ("loss", "grad_norm", "mismatch_kl"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name
    assert all(result["routers_left_clean"] for result in results)


def bfloat16_steps(
    groups: ParallelGroups, settings: dict[str, Any], weights: dict[str, Tensor]
) -> tuple[list[dict[str, float]], dict[str, Tensor], dict[str, float]]:
    """Metrics of three updates, weights, and bytes of the optimizer by where they are."""
    config = TrainerConfig(lr=1e-2, weight_decay=0.1, **settings)
    trainer = MegatronTrainer(config, DENSE, groups)
    trainer.load_hf_weights(weights)
    batch = uneven_batch()
    batch = batch.with_column("log_probs", batch.columns["rollout_log_probs"])
    metrics = [trainer.train_step(batch).metrics for _ in range(3)]
    inner = trainer.optimizer.optimizer.chained_optimizers[0].optimizer  # type: ignore[union-attr]
    on_host = getattr(inner, "gpu_params_map_cpu_copy", {})
    held = {parameter: parameter.numel() for g in inner.param_groups for parameter in g["params"]}
    share = sum(n for p, n in held.items() if p in on_host) / max(1, sum(held.values()))
    return metrics, exported(trainer), {"share": share}


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_an_optimizer_in_host_memory_updates_as_one_on_the_device(
    run_ranks: RunRanks, fraction: float, overlaps: bool
) -> None:
    weights = tiny_models.hf_state_dict(DENSE)
    offloaded = {
        **OFFLOADED,
        "optimizer_offload_fraction": fraction,
        "overlap_cpu_optimizer_d2h_h2d": overlaps,
    }
    plain = run_ranks(bfloat16_steps, 2, SHARDED, weights)
    found = run_ranks(bfloat16_steps, 2, offloaded, weights)
    for (mine, weights_now, where), (theirs, expected, _) in zip(found, plain, strict=True):
        for done, wanted in zip(mine, theirs, strict=True):
            assert done == pytest.approx(wanted, rel=1e-3, abs=1e-6)
        for name, weight in expected.items():
            # A rounding of bfloat16 at most, and of few: Adam on the host is another kernel.
            off = weights_now[name] != weight
            assert off.float().mean() < 0.01, name
            torch.testing.assert_close(weights_now[name], weight, rtol=2**-7, atol=1e-6, msg=name)
        assert where["share"] == pytest.approx(fraction, abs=0.2)


@pytest.mark.parametrize("saved", ["offloaded", "on the device"])
@pytest.mark.parametrize("loaded", ["offloaded", "on the device"])
def test_a_checkpoint_moves_between_host_and_device_and_other_layouts(
    rank_pool: RankPool, tmp_path: Path, saved: str, loaded: str
) -> None:
    settings = {"offloaded": OFFLOADED, "on the device": SHARDED}
    root, weights = str(tmp_path / "checkpoints"), tiny_models.hf_state_dict(DENSE)
    source = (DENSE, weights, settings[saved], root)
    expected = rank_pool.run_ranks(train_save_train, 2, *source)
    target = (DENSE, settings[loaded], root, None)
    for sizes in ({}, PP2):
        resumed = rank_pool.run_ranks(resume_train, 2, *target, **sizes)
        for mine, theirs in zip(resumed[0]["next"], expected[0]["next"], strict=True):
            assert mine == pytest.approx(theirs, rel=2e-3, abs=1e-6)
