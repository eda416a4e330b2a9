"""What only GPUs have: Transformer Engine's layers, packed (THD) attention, its context parallelism, FP8."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.megatron_backend.parallel_groups import ParallelGroups
from tests.parallel.training_jobs import Start, new_trainer

NUM_GPUS = 2

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="Transformer Engine is not installed",
)

BF16 = {"train_dtype": "bfloat16", "transformer_impl": "transformer_engine"}
#: Log-probs around -4 in bfloat16 on a random 4-layer model: two roundings of 2^-8 relative.
CLOSE = 0.06

RunRanks = Callable[..., list[Any]]


def log_probs_on_rank(
    groups: ParallelGroups, start: Start, settings: dict[str, Any], layout: str
) -> list[Tensor]:
    """Log-probs of the whole batch before any update."""
    trainer = new_trainer(groups, start, settings, layout)
    return trainer.compute_log_probs(start.batch)


def steps_on_rank(
    groups: ParallelGroups, start: Start, settings: dict[str, Any]
) -> list[dict[str, float]]:
    """Metrics of two updates on the same batch."""
    trainer = new_trainer(groups, start, settings)
    return [trainer.train_step(start.batch).metrics for _ in range(2)]


def largest_difference(first: list[Tensor], second: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_transformer_engine_and_local_layers_compute_the_same_model(
    run_real_ranks: RunRanks, family: str
) -> None:
    start = Start.of(family)
    local = {"train_dtype": "bfloat16", "transformer_impl": "local"}
    (one,) = run_real_ranks(log_probs_on_rank, 1, start, BF16, "packed")
    (other,) = run_real_ranks(log_probs_on_rank, 1, start, local, "packed")
    assert largest_difference(one, other) < CLOSE


def test_samples_packed_for_thd_attention_do_not_see_each_other(run_real_ranks: RunRanks) -> None:
    start = Start.of("qwen3")
    packed = {**BF16, "max_tokens_per_gpu": 1000}
    alone = {**BF16, "micro_batch_size": 1}
    (together,) = run_real_ranks(log_probs_on_rank, 1, start, packed, "packed")
    (separate,) = run_real_ranks(log_probs_on_rank, 1, start, alone, "packed")
    assert largest_difference(together, separate) < CLOSE


def test_context_parallelism_of_transformer_engine_gives_the_step_of_one_rank(
    run_real_ranks: RunRanks,
) -> None:
    start = Start.of("qwen3")
    settings = {**BF16, "max_tokens_per_gpu": 64, "policy_loss": "icepop"}
    (one,) = run_real_ranks(steps_on_rank, 1, start, settings)
    two = run_real_ranks(steps_on_rank, 2, start, settings, context_parallel_size=2)[0]
    for alone, split in zip(one, two, strict=True):
        for name in ("loss", "grad_norm", "mismatch_kl"):
            assert split[name] == pytest.approx(alone[name], rel=CLOSE), name


def test_a_float16_step_with_a_loss_scale_is_near_that_of_bfloat16(
    run_real_ranks: RunRanks,
) -> None:
    start = Start.of("qwen3")
    half = {**BF16, "train_dtype": "float16", "initial_loss_scale": 1024.0, "loss_scale_window": 1}
    (scaled,) = run_real_ranks(steps_on_rank, 1, start, half)
    (plain,) = run_real_ranks(steps_on_rank, 1, start, BF16)
    assert [step["loss_scale"] for step in scaled] == [1024.0, 2048.0]
    for one, other in zip(scaled, plain, strict=True):
        for name in ("loss", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=CLOSE), name


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="FP8 needs compute capability 8.9",
)
def test_fp8_layers_give_finite_steps_and_log_probs_near_those_of_bfloat16(
    run_real_ranks: RunRanks,
) -> None:
    # FP8 products need 16 | tokens: `--fp8` pads the packed rows of these uneven samples.
    start = Start.of("qwen3")
    settings = {**BF16, "max_tokens_per_gpu": 64}
    quantized = {**settings, "fp8": "hybrid"}
    (plain,) = run_real_ranks(log_probs_on_rank, 1, start, settings, "packed")
    (rounded,) = run_real_ranks(log_probs_on_rank, 1, start, quantized, "packed")
    assert all(bool(values.isfinite().all()) for values in rounded)
    assert 0 < largest_difference(plain, rounded) < 1.0
    (steps,) = run_real_ranks(steps_on_rank, 1, start, quantized)
    assert all(0 < step["grad_norm"] < float("inf") for step in steps)
