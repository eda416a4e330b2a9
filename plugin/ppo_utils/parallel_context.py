"""Which process groups the tokens in front of us are split over.

The loss and the corrections receive flat local tensors. Under tensor parallelism the vocabulary is split
over `tp_group`; under context parallelism each sample's tokens are split over `cp_group`. With neither, all
groups are None and everything runs in one process.
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
    """Make `context` the one that `current_parallel_context` answers with."""
    token = _active.set(context)
    try:
        yield
    finally:
        _active.reset(token)


def current_parallel_context() -> ParallelContext:
    """The active context; else Megatron's own, if Megatron runs in this process; else a single process."""
    active = _active.get()
    if active is not None:
        return active
    # Another framework may call us inside its own Megatron process without telling us its groups. Megatron is
    # consulted only if that framework has loaded it, so that torch alone stays enough to import this package.
    if "megatron.core.parallel_state" in sys.modules:
        from plugin.megatron_backend.parallel_groups import ambient_parallel_context

        return ambient_parallel_context() or SINGLE_PROCESS
    return SINGLE_PROCESS
