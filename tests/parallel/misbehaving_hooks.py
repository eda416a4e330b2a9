"""Correction hooks that go wrong on one rank, for one microbatch, while `armed`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

#: The response length (of one sample only) for which a hook goes wrong.
BAD_RESPONSE = 12
_bad_rank: int | None = None


@contextmanager
def armed(rank: int) -> Iterator[None]:
    """Inside, hooks go wrong on `rank`."""
    global _bad_rank
    _bad_rank = rank
    try:
        yield
    finally:
        _bad_rank = None


def raises_once(
    args: Any, *, pg_loss: torch.Tensor, loss_masks: Any, response_lengths: Any, **_: Any
) -> Any:
    """Raises on one rank for the microbatch with the longest response."""
    if dist.get_rank() == _bad_rank and BAD_RESPONSE in response_lengths:
        raise ZeroDivisionError(f"a hook failed on rank {dist.get_rank()}")
    return pg_loss, loss_masks, {}


def raises_for_one_sample(
    args: Any, *, pg_loss: torch.Tensor, loss_masks: Any, response_lengths: Any, **_: Any
) -> Any:
    """Raises for one sample, on whichever ranks hold it."""
    if _bad_rank is not None and BAD_RESPONSE in response_lengths:
        raise ZeroDivisionError(f"a hook failed on rank {dist.get_rank()}")
    return pg_loss, loss_masks, {}


def metric_of_one_rank(
    args: Any, *, pg_loss: torch.Tensor, loss_masks: Any, response_lengths: Any, **_: Any
) -> Any:
    """Records one more metric on one rank, for all of its microbatches."""
    odd = dist.get_rank() == _bad_rank
    return pg_loss, loss_masks, {"odd": torch.zeros_like(pg_loss)} if odd else {}


def metric_of_one_microbatch(
    args: Any, *, pg_loss: torch.Tensor, loss_masks: Any, response_lengths: Any, **_: Any
) -> Any:
    """Records one more metric for one microbatch, on every rank."""
    odd = _bad_rank is not None and BAD_RESPONSE in response_lengths
    return pg_loss, loss_masks, {"odd": torch.zeros_like(pg_loss)} if odd else {}


def nan_for_one_sample(
    args: Any,
    *,
    pg_loss: torch.Tensor,
    loss_masks: Any,
    cur_log_probs: Any,
    response_lengths: Any,
    **_: Any,
) -> Any:
    """Multiplies one sample's loss by NaN, on whichever ranks hold it."""
    if _bad_rank is None or BAD_RESPONSE not in response_lengths:
        return pg_loss, loss_masks, {}
    parts = list(pg_loss.split([len(values) for values in cur_log_probs]))
    index = response_lengths.index(BAD_RESPONSE)
    parts[index] = parts[index] * float("nan")
    return torch.cat(parts), loss_masks, {}
