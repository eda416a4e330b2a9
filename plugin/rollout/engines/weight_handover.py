"""Weights within a device: a trainer's rank lends memory, and the engine's worker there reads it.

For engines that share the trainer's devices (`--colocate`), whose processes cannot join one NCCL
group. The rank copies a bucket into memory that it lends and announces the handle; the workers on
its device load the bucket, let the memory go and say so, and the rank uses it for the next bucket.
After the last one it is given up. A rank that waits for a worker which has died is released by the
driver, as in every transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from plugin.rollout.engines.lent_memory import LentMemory, borrowed
from plugin.rollout.engines.weight_meeting import (
    BUCKET_BYTES,
    MeetingPoint,
    NamedTensors,
    TensorNote,
    WeightGroup,
    in_buckets,
    padded_sizes,
    tensors_in,
)
from plugin.rollout.engines.weight_stream import WeightReceiver, WeightSender


class HandoverSender:
    """The end of a group at trainer rank `rank`."""

    def __init__(self, group: WeightGroup, rank: int) -> None:
        self._point, self._rank = MeetingPoint(group), rank
        self._borrowers = group.lenders.count(rank)
        self._point.meet("joined")

    @property
    def group(self) -> WeightGroup:
        """The group that it is a member of."""
        return self._point.group

    def send(
        self,
        version: int,
        part: Iterable[tuple[str, Tensor] | None],
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> tuple[int, int]:
        """Hand all tensors over as `version`; how many bytes and messages."""
        self._point.meet(f"version {version}")
        total, messages = 0, 0
        memory: LentMemory | None = None
        try:
            for bucket in filter(None, in_buckets(part, bucket_bytes)):
                notes = TensorNote.of(bucket)
                size = sum(padded_sizes(notes))
                if memory is None or memory.tensor.numel() < size:
                    memory = _replaced(memory, size)
                _fill(memory, bucket, notes)
                self._point.announce(version, self._rank, messages, notes, memory.handle)
                self._point.wait_until_taken(version, self._rank, messages, self._borrowers)
                total += sum(note.nbytes for note in notes)
                messages += 1
        finally:
            if memory is not None:
                memory.close()
        self._point.announce(version, self._rank, messages, None)
        return total, messages + 1

    def close(self, *, in_the_middle: bool = False) -> None:
        """Leave the group; memory is lent only while `send` runs."""


class HandoverReceiver:
    """The end of a group at worker `number` of all engines' workers.

    keeps: whether the taker keeps the tensors, which then are copies
    """

    def __init__(self, group: WeightGroup, number: int, *, keeps: bool = False) -> None:
        self._point, self._keeps = MeetingPoint(group), keeps
        self._lender = group.lenders[number]
        self._point.meet("joined")

    @property
    def group(self) -> WeightGroup:
        """The group that it is a member of."""
        return self._point.group

    def meet(self, version: int) -> None:
        """Wait until every member is ready for `version`."""
        self._point.meet(f"version {version}")

    def receive(self, version: int, take: Callable[[NamedTensors], None]) -> None:
        """Hand every bucket of `version` to `take`, after `meet`."""
        announced = self._point.announced(version, self._lender)
        for number, (notes, handle) in enumerate(announced):
            tensors = tensors_in(borrowed(handle), notes)
            if self._keeps:
                tensors = [tensor.clone() for tensor in tensors]
            take([(note.name, tensor) for note, tensor in zip(notes, tensors, strict=True)])
            _finish_copies()
            del tensors
            self._point.say_taken(version, self._lender, number)

    def close(self, *, in_the_middle: bool = False) -> None:
        """Leave the group."""


def sender_of(group: WeightGroup, number: int) -> WeightSender | HandoverSender:
    """The sender of a rank: its own number where it lends, else its number of those that send."""
    return HandoverSender(group, number) if group.lenders else WeightSender(group, number)


def receiver_of(
    group: WeightGroup, number: int, *, keeps: bool = False
) -> WeightReceiver | HandoverReceiver:
    """The receiver of a worker; `keeps`: whether the taker keeps the tensors."""
    kind = HandoverReceiver if group.lenders else WeightReceiver
    return kind(group, number, keeps=keeps)


def _replaced(memory: LentMemory | None, size: int) -> LentMemory:
    """More memory, after the old one was given up."""
    if memory is not None:
        memory.close()
    return LentMemory(size)


def _fill(memory: LentMemory, bucket: NamedTensors, notes: list[TensorNote]) -> None:
    """Copy a bucket into lent memory.

    A function of its own, because an error's traceback would keep views of the memory alive.
    """
    for (_, tensor), place in zip(bucket, tensors_in(memory.tensor, notes), strict=True):
        place.copy_(tensor)
    _finish_copies()


def _finish_copies() -> None:
    """Wait for copies on the GPU: the other process does not see this one's streams."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
