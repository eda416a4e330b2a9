"""Calls a correction hook on hand-written log-ratios."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

GARBAGE = [math.nan, math.inf, -math.inf, 1e30, -1e30]


def logs(*ratios: float) -> Tensor:
    """log of each ratio."""
    return torch.tensor([math.log(ratio) for ratio in ratios])


def call_hook(
    hook: Callable[..., Any],
    *,
    train: Sequence[Tensor] | None,
    rollout: Sequence[Tensor] | None = None,
    cur: Sequence[Tensor] | None = None,
    masks: Sequence[Tensor] | None = None,
    pg_loss: Tensor | None = None,
    flags: dict[str, Any] | None = None,
    **extra: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """The hook's result for a loss of ones, against a rollout policy of log-prob 0 unless given."""
    like = train if train is not None else cur
    assert like is not None
    rollout = [torch.zeros_like(value) for value in like] if rollout is None else rollout
    masks = (
        [torch.ones(len(value), dtype=torch.int64) for value in like] if masks is None else masks
    )
    pg_loss = torch.ones(sum(len(mask) for mask in masks)) if pg_loss is None else pg_loss
    return hook(
        args=Namespace(**(flags or {})),
        pg_loss=pg_loss,
        train_log_probs=train,
        rollout_log_probs=rollout,
        cur_log_probs=cur,
        loss_masks=masks,
        total_lengths=[len(mask) + 2 for mask in masks],
        response_lengths=[len(mask) for mask in masks],
        **extra,
    )
