"""A trainer whose memory is lent between steps trains like one that keeps it, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plugin.megatron_backend.offloading import ALL_PARTS, TrainerMemory
from plugin.megatron_backend.parallel_groups import ParallelGroups
from tests.held_bytes import bytes_held
from tests.parallel.training_jobs import RunRanks, Start, exported, new_trainer

CYCLES = 3


def train(
    groups: ParallelGroups, start: Start, settings: dict[str, Any], lends: bool
) -> tuple[list[Any], dict[str, torch.Tensor], list[int], list[int]]:
    """Steps with or without lending in between: losses, weights, bytes held before and while lent."""
    trainer = new_trainer(groups, start, settings)
    assert trainer.optimizer is not None
    memory = TrainerMemory(trainer.chunks, trainer.optimizer.optimizer)
    losses, before, lent = [], [], []

    def held() -> int:
        parts = (memory.weights, memory.gradients, memory.optimizer_state)
        return sum(bytes_held(part()) for part in parts)

    for _ in range(CYCLES):
        losses.append(trainer.train_step(start.batch).metrics["loss"])
        if lends:
            before.append(held())
            freed = memory.offload(ALL_PARTS[:2])
            exported(trainer)  # as when weights are sent
            freed += memory.offload(ALL_PARTS[2:])
            assert freed == before[-1]
            lent.append(held())
            memory.onload(ALL_PARTS[::-1])
            assert held() == before[-1]
    return losses, exported(trainer), before, lent


@pytest.mark.parametrize(
    ("family", "sizes", "settings"),
    [
        ("qwen3", {"tensor_model_parallel_size": 2}, {}),
        pytest.param(
            *("qwen3", {}, {"use_distributed_optimizer": True, "train_dtype": "bfloat16"}),
            marks=pytest.mark.slow,
        ),
        pytest.param(*("qwen3_moe", {"expert_model_parallel_size": 2}, {}), marks=pytest.mark.slow),
    ],
)
def test_lending_memory_changes_no_bit_and_leaks_none(
    run_ranks: RunRanks, family: str, sizes: dict[str, int], settings: dict[str, Any]
) -> None:
    start = Start.of(family)
    plain = run_ranks(train, 2, start, settings, False, **sizes)
    lending = run_ranks(train, 2, start, settings, True, **sizes)
    for (losses, weights, _, _), (same, equal, before, lent) in zip(plain, lending, strict=True):
        assert losses == same
        assert all(torch.equal(weights[name], equal[name]) for name in weights)
        assert len(set(before)) == 1 and before[0] > 0
        assert lent == [0] * CYCLES
