"""Samples with known numbers for the tests of dumps and comparisons."""

from __future__ import annotations

from typing import Any

import torch


def batch_columns(samples: int = 6, seed: int = 0, noise: float = 0.05) -> dict[str, list[Any]]:
    """Columns of a step: responses of 1, 2, 3, ... tokens after a prompt of 2, rollouts near the trainer."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [i % 7 + 1 for i in range(samples)]
    train = [-3 * torch.rand(length, generator=generator) - 0.5 for length in lengths]
    return {
        "unconcat_tokens": [torch.arange(length + 2) for length in lengths],
        "total_lengths": [length + 2 for length in lengths],
        "response_lengths": lengths,
        "loss_masks": [torch.ones(length, dtype=torch.int64) for length in lengths],
        "advantages": [
            torch.full((length,), 1.0 if i % 2 else -1.0) for i, length in enumerate(lengths)
        ],
        "log_probs": train,
        "cur_log_probs": [value.clone() for value in train],
        "rollout_log_probs": [
            value + noise * torch.randn(len(value), generator=generator) for value in train
        ],
        "rewards": [float(i % 2) for i in range(samples)],
        "weight_versions": [3 for _ in lengths],
    }
