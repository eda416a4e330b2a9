"""Hooks that ranks load by path: what a chain kept, and statistics of the whole batch declared by a user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plugin.ppo_utils import batch_statistics, mask_only


@mask_only
def fingerprint(
    args: Any, *, pg_loss: Tensor, loss_masks: Any, advantages: Sequence[Tensor], **_: Any
) -> Any:
    """Leaves the loss alone; reports the advantages of what is left, whose sum tells sets apart."""
    values = torch.cat(list(advantages)) if advantages else torch.zeros(0)
    left = torch.where(pg_loss.detach() != 0, values, 0.0)
    return pg_loss, loss_masks, {"left": left, "left_squared": left.square()}


def _mean(log_ratios: Tensor, config: Any, known: Sequence[Tensor]) -> Tensor | None:
    if known:
        return None
    return torch.stack([log_ratios.double().sum(), torch.ones_like(log_ratios).double().sum()])


@batch_statistics(_mean)
def centered(
    args: Any, *, pg_loss: Tensor, loss_masks: Any, batch_statistics: Any = None, **_: Any
) -> Any:
    """Weights by exp(-mean of the whole batch's log-ratios)."""
    total, count = batch_statistics[0].tolist()
    weight = torch.full_like(pg_loss, -total / count).exp()
    return pg_loss * weight, loss_masks, {"centered": weight}


def _uneven(log_ratios: Tensor, config: Any, known: Sequence[Tensor]) -> Tensor | None:
    return None if known else log_ratios.double()


@batch_statistics(_uneven)
def of_no_common_size(args: Any, *, pg_loss: Tensor, loss_masks: Any, **_: Any) -> Any:
    """Wants to add up one number per token, of which ranks hold different counts."""
    return pg_loss, loss_masks, {}


def _failing(log_ratios: Tensor, config: Any, known: Sequence[Tensor]) -> Tensor | None:
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
        raise ValueError("this rank cannot")
    return None if known else torch.ones(1)


@batch_statistics(_failing)
def failing_on_one_rank(args: Any, *, pg_loss: Tensor, loss_masks: Any, **_: Any) -> Any:
    return pg_loss, loss_masks, {}
