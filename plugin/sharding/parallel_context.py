"""The process groups that tokens and vocabulary are split over.

The loss and the corrections receive flat local tensors. Under tensor parallelism the vocabulary is
split over `tp_group`; under context parallelism each sample's tokens are split over `cp_group`.
With neither, all groups are None and everything runs in one process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class ParallelContext:
    """Process groups of this rank; `None` means not split."""

    tp_group: dist.ProcessGroup | None = None
    cp_group: dist.ProcessGroup | None = None
    cp_rank: int = 0
    cp_size: int = 1


SINGLE_PROCESS = ParallelContext()
_active: ContextVar[ParallelContext | None] = ContextVar("parallel_context", default=None)


@contextmanager
def use_parallel_context(context: ParallelContext) -> Iterator[None]:
    """Make `context` the one that `current_parallel_context` returns."""
    token = _active.set(context)
    try:
        yield
    finally:
        _active.reset(token)


def current_parallel_context() -> ParallelContext:
    """The active context; else that of a Megatron in this process; else a single process."""
    return _active.get() or _megatron_context() or SINGLE_PROCESS


def _megatron_context() -> ParallelContext | None:
    """The groups of a Megatron that another framework runs in this process; None if none does.

    slime calls our loss without passing its groups. Megatron is looked up, never imported: torch
    alone stays enough to import this package.
    """
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return None
    tp_group, cp_group = state.get_tensor_model_parallel_group(), state.get_context_parallel_group()
    return ParallelContext(
        tp_group=tp_group if tp_group.size() > 1 else None,
        cp_group=cp_group if cp_group.size() > 1 else None,
        cp_rank=cp_group.rank(),
        cp_size=cp_group.size(),
    )
