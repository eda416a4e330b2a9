"""Finds values that no token may carry, and says where they are."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from plugin.errors import BatchError
from plugin.sharding.sequence_shards import SequenceShards

#: No real log-prob or advantage is larger; a sentinel such as -1e30 is.
MAX_ABS_VALUE = 1e4
#: exp of more than this overflows float32 (at 88.7); no numeric mismatch comes near it.
MAX_ABS_LOG_RATIO = 80.0


def check_values(fields: Mapping[str, Tensor | None], mask: Tensor, shards: SequenceShards) -> None:
    """Raise a `BatchError` for the first unmasked value that is not finite or is absurdly large.

    fields: name -> [T] raw values, masked positions may hold anything. Reads one flag from the device.
    """
    bad = {name: _bad(value, mask) for name, value in fields.items() if value is not None}
    if not bad or not bool(torch.stack([flags.any() for flags in bad.values()]).any()):
        return
    for name, flags in bad.items():
        if bool(flags.any()):
            index = int(flags.nonzero()[0])
            value = fields[name]
            assert value is not None
            raise BatchError(
                f"{name} is {float(value.detach()[index])} at {_place(index, shards)}, where the loss mask is 1; it must "
                f"be finite and within +-{MAX_ABS_VALUE:g}. Mask the token or repair the source of {name}"
            )


def check_log_ratio(
    first: str, second: str, values: Tensor, mask: Tensor, shards: SequenceShards
) -> None:
    """Raise a `BatchError` if an unmasked log-ratio [T] is too large for any numeric mismatch."""
    flags = mask & (values.detach().abs() > MAX_ABS_LOG_RATIO)
    if bool(flags.any()):
        index = int(flags.nonzero()[0])
        raise BatchError(
            f"{first} - {second} is {float(values[index]):.4g} at {_place(index, shards)}; a log-ratio beyond "
            f"+-{MAX_ABS_LOG_RATIO:g} is no mismatch but a misaligned or foreign log-prob. Check that both "
            "belong to the same token"
        )


def raise_on_all_shards(error: BatchError | None, shards: SequenceShards) -> None:
    """Raise `error`; under context parallelism raise on every rank that holds a part of the same samples."""
    context = shards.context
    if context.cp_group is not None and context.cp_size > 1:
        failed = torch.tensor(float(error is not None), device=shards.device)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=context.cp_group)
        if error is None and bool(failed):
            raise BatchError(
                "another context parallel rank found a value that no token may carry in its part of these samples; "
                "its message names field, sample and position"
            )
    if error is not None:
        raise error


def _bad(values: Tensor, mask: Tensor) -> Tensor:
    # NaN fails every comparison, so "not within bounds" also catches it.
    return mask & ~(values.detach().abs() <= MAX_ABS_VALUE)


def _place(index: int, shards: SequenceShards) -> str:
    """Sample and response position of a flat local index."""
    for sample, spans in enumerate(shards.spans):
        for start, end in spans:
            if index < end - start:
                return f"sample {sample}, position {start + index}"
            index -= end - start
    raise AssertionError("index beyond the local tokens")
