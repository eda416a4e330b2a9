"""Weights within a device: a trainer's rank lends memory, and the engine's worker there reads it.

For engines that share the trainer's devices (`--colocate`), whose processes cannot join one NCCL
group. The rank copies a bucket into memory that it lends and announces the handle; the workers on
its device load the bucket, let the memory go and say so, and the rank uses it for the next bucket.
After the last one it is given up. A rank that waits for a worker which has died is released by the
driver, as in every transfer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from plugin.weights.broadcast import WeightReceiver, WeightSender
from plugin.weights.ipc_buffer import LentMemory, borrowed
from plugin.weights.members import Receiver, Sender
from plugin.weights.store import (
    NamedTensors,
    TensorNote,
    WeightGroup,
    padded_sizes,
    tensors_in,
)


class HandoverSender(Sender):
    """The end of a group at trainer rank `rank`."""

    takes_turns = False

    def __init__(self, group: WeightGroup, rank: int) -> None:
        super().__init__(group, rank)
        self._borrowers = group.lenders.count(rank)
        self._memory: LentMemory | None = None

    def _pass_on(
        self, version: int, number: int, bucket: NamedTensors, notes: list[TensorNote]
    ) -> None:
        memory = self._memory_of(sum(padded_sizes(notes)))
        _fill(memory, bucket, notes)
        self._point.announce(version, self._number, number, notes, memory.handle)
        self._point.wait_until_taken(version, self._number, number, self._borrowers)

    def _memory_of(self, size: int) -> LentMemory:
        if self._memory is None or self._memory.tensor.numel() < size:
            self._end_version()
            self._memory = LentMemory(size)
        return self._memory

    def _end_version(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def close(self, *, in_the_middle: bool = False) -> None:
        """Leave the group; memory is lent only while `send` runs."""


class HandoverReceiver(Receiver):
    """The end of a group at worker `number` of all engines' workers.

    keeps: whether the taker keeps the tensors, which then are copies
    """

    def __init__(self, group: WeightGroup, number: int, *, keeps: bool = False) -> None:
        super().__init__(group)
        self._lender, self._keeps = group.lenders[number], keeps

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


def sender_of(group: WeightGroup, number: int) -> Sender:
    """The sender of a rank: its own number where it lends, else its number of those that send."""
    return HandoverSender(group, number) if group.lenders else WeightSender(group, number)


def receiver_of(group: WeightGroup, number: int, *, keeps: bool = False) -> Receiver:
    """The receiver of a worker; `keeps`: whether the taker keeps the tensors."""
    kind = HandoverReceiver if group.lenders else WeightReceiver
    return kind(group, number, keeps=keeps)


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
