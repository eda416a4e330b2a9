"""A process group of one process: it counts messages and answers as if all ranks did the same.

`torch.distributed` calls these methods directly, so that tensors of any device pass. Real tensors
(sizes, counts, pickled objects) get what the other ranks would send if they did the same as this
one; tensors without data keep having none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_BACKEND = "megatron_tis_plan"


@dataclass
class Traffic:
    """Collectives by (group, operation): how many, and this rank's input bytes.

    counts: of all; per_microbatch: those of them inside a schedule
    expected_shapes: of the messages of a neighboring pipeline stage, by microbatch
    object_bytes: of the pickled metrics that the last stage sends to the others
    """

    counts: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    per_microbatch: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    in_schedule: bool = False
    expected_shapes: Sequence[tuple[int, ...]] = ()
    object_bytes: int = 0
    received: dict[bool, int] = field(default_factory=dict)

    def add(self, group: str, operation: str, size: int) -> None:
        # Reductions and gathers over data parallel ranks run once, also where they are overlapped.
        repeats = self.in_schedule and "DATA_PARALLEL" not in group
        for table in [self.counts, self.per_microbatch] if repeats else [self.counts]:
            entry = table.setdefault((group, operation), [0, 0])
            entry[0] += 1
            entry[1] += size

    def reset(self) -> None:
        """Forget what was counted."""
        for table in (self.counts, self.per_microbatch, self.received):
            table.clear()

    def next_shape(self, backwards: bool) -> tuple[int, ...]:
        """The shape that the previous stage announces; with `backwards`, the next one."""
        number = self.received.get(backwards, 0)
        self.received[backwards] = number + 1
        return self.expected_shapes[number]


class _Done(dist._Work):
    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# Any: the methods that torch.distributed calls have several signatures, of which it uses one.
_ProcessGroup: Any = dist.ProcessGroup


class CountedGroup(_ProcessGroup):
    """The group of one rank of many; only this rank exists."""

    def __init__(self, rank: int, size: int, traffic: Traffic) -> None:
        super().__init__(rank, size)
        self._place, self._count, self._traffic = rank, size, traffic
        self.label = "world"

    def size(self) -> int:
        return self._count

    def rank(self) -> int:
        return self._place

    def getBackendName(self) -> str:
        return _BACKEND

    def _get_backend(self, device: torch.device) -> None:
        """None: no backend that joins sends and receives (torch 2.14 asks of every group)."""

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names.get(self, "gone")

    def _counted(self, operation: str, tensors: Iterable[Tensor]) -> _Done:
        if self._count > 1:
            self._traffic.add(self.label, operation, _nbytes(tensors))
        return _Done()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Done:
        summed = opts is not None and opts.reduceOp == dist.ReduceOp.SUM
        for tensor in tensors:
            if summed and not tensor.is_meta:
                tensor.mul_(self._count)
        return self._counted("all_reduce", tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> _Done:
        return self._counted("broadcast", tensors)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> _Done:
        return self._counted("reduce", tensors)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> _Done:
        for parts, own in zip(outputs, inputs, strict=True):
            for part in parts:
                _copy(part, own)
        return self._counted("all_gather", inputs)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> _Done:
        for part in output.view(self._count, -1):
            _copy(part, own.reshape(-1))
        return self._counted("all_gather", [own])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> _Done:
        return self._counted("all_gather", inputs)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> _Done:
        return self._counted("reduce_scatter", [part for parts in inputs for part in parts])

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> _Done:
        return self._counted("reduce_scatter", [whole])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> _Done:
        return self._counted("reduce_scatter", inputs)

    def all_to_all_single(
        self, output: Tensor, own: Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> _Done:
        return self._counted("all_to_all", [own])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Done:
        return self._counted("all_to_all", inputs)

    def gather(self, outputs: Any, inputs: list[Tensor], opts: Any = None) -> _Done:
        return self._counted("gather", inputs)

    def scatter(self, outputs: list[Tensor], inputs: Any, opts: Any = None) -> _Done:
        return self._counted("scatter", outputs)

    def barrier(self, opts: Any = None) -> _Done:
        return self._counted("barrier", [])

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> _Done:
        return self._counted("send", tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> _Done:
        for tensor in tensors:
            if not tensor.is_meta and tensor.dtype is torch.int64:
                backwards = peer == (self._place + 1) % self._count and (
                    self._count > 2 or self._place == 0
                )
                tensor.copy_(torch.tensor(self._traffic.next_shape(backwards)))
        return self._counted("receive", tensors)


def _copy(target: Tensor, source: Tensor) -> None:
    if not (target.is_meta or source.is_meta):
        target.copy_(source)


@contextmanager
def fake_world(
    rank: int, world_size: int, sizes: dict[str, Any], traffic: Traffic
) -> Iterator[Any]:
    """Megatron's own groups for `rank` of `world_size` in the body; yields `ParallelGroups`.

    sizes: Megatron's names of parallel sizes
    """
    from megatron.core import parallel_state

    from plugin.megatron_backend import cpu_runtime
    from plugin.megatron_backend.parallel_groups import destroy_parallel, read_parallel_groups

    cpu_runtime.activate()

    def create(_store: Any, group_rank: int, group_size: int, _timeout: Any) -> CountedGroup:
        return CountedGroup(group_rank, group_size, traffic)

    dist.Backend.register_backend(_BACKEND, create, devices=["cpu", "cuda"])
    original = parallel_state.create_group

    def create_own(ranks: Any = None, **options: Any) -> Any:
        # Of the groups of other ranks nothing is ever used; at 1,024 ranks they are thousands.
        if rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        group = original(ranks, **{**options, "backend": None, "pg_options": None})
        group.label = options.get("group_desc") or "world"
        return group

    parallel_state.create_group, show_error = create_own, sys.excepthook
    try:
        dist.init_process_group(_BACKEND, rank=rank, world_size=world_size, store=dist.HashStore())
        parallel_state.initialize_model_parallel(**sizes)
        yield read_parallel_groups()
    finally:
        parallel_state.create_group = original
        sys.excepthook = show_error  # torch lets it put the rank in front of every line
        destroy_parallel()
