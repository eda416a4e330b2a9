"""What a correction may know of the whole batch before it sees a token.

A threshold that depends on the batch (its second moment, its effective sample size) must not depend
on how the batch was cut. A correction therefore declares it, with `@batch_statistics(fn)`:

    fn(log_ratios, config, known) -> Tensor | None

log_ratios: [n] float32, train - rollout of the tokens with loss that this rank holds, of all its
    microbatches
known: what the earlier rounds found, each summed over all ranks, on the CPU; empty at first
returns: what to sum over all ranks in this round, of one shape on every rank; None: enough is known

Whether it returns None may depend on `config` and `known` alone, which all ranks share. The sums
then arrive at the correction as `batch_statistics`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Statistics = tuple[Tensor, ...]
Declaration = Callable[[Tensor, Any, Sequence[Tensor]], Tensor | None]
Function = TypeVar("Function", bound=Callable[..., Any])


def batch_statistics(declaration: Declaration) -> Callable[[Function], Function]:
    """Declare what a correction needs to know of the whole batch."""

    def declare(function: Function) -> Function:
        function.batch_statistics = declaration  # type: ignore[attr-defined]
        return function

    return declare


def declared_statistics(function: Callable[..., Any], config: Any) -> Declaration | None:
    """What `function` declares, if it needs anything with these flags."""
    declaration: Declaration | None = getattr(function, "batch_statistics", None)
    if declaration is None or declaration(torch.zeros(0), config, ()) is None:
        return None
    return declaration


def collect_statistics(
    declaration: Declaration,
    log_ratios: Tensor,
    config: Any,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Statistics:
    """Run the rounds of a declaration; `reduce` sums a tensor over ranks, None = only this one."""
    known: list[Tensor] = []
    while (part := declaration(log_ratios, config, known)) is not None:
        known.append((part if reduce is None else reduce(part)).cpu())
    return tuple(known)


def microbatch_statistics(
    declaration: Declaration,
    log_ratios: Tensor,
    config: Any,
    cp_group: dist.ProcessGroup | None = None,
) -> Statistics:
    """The statistics of one microbatch, over its context parallel ranks; warns once.

    For callers that cannot look at the whole batch first, such as another framework's loss.
    """
    _warn_of_microbatches()

    def over_context(part: Tensor) -> Tensor:
        if cp_group is not None:
            dist.all_reduce(part, group=cp_group)
        return part

    return collect_statistics(declaration, log_ratios, config, over_context)


@functools.cache
def _warn_of_microbatches() -> None:
    warnings.warn(
        "a correction with a threshold over the whole batch is called microbatch by microbatch: "
        "the threshold is each microbatch's own and depends on the cut. Train with megatron-tis or "
        "MegatronTrainer for the whole batch's.",
        stacklevel=4,
    )
