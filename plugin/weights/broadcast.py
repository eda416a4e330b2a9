"""Weights over process groups: from the trainer's ranks to the workers of all engines.

Every sender has a group of its own, in which it is rank 0 and every worker is a receiver: gloo on
CPU, NCCL on CUDA. It sends what it holds itself: the first rank of a pipeline stage what the
stage's ranks share, every expert parallel rank its own experts. That happens bucket by bucket, with
one broadcast per large tensor and one for the small ones, which would cost more by their number
than by their size. Receivers take the senders of a stage in turns, some layers from each, so that
no layer waits long for its last expert.

Keys in the store are those of torch's own groups, so that SGLang's servers can join.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plugin.errors import TransferError
from plugin.weights.group import (
    GroupStore,
    NamedTensors,
    Receiver,
    Sender,
    TensorSpec,
    WeightGroup,
    padded_sizes,
    tensors_in,
)

_SMALL_BYTES = 1 << 20

#: gloo cannot end an operation that is under way, and its group cannot be freed before.
_abandoned: list[Any] = []


class _Channel:
    """This process's place in the group of one sender."""

    def __init__(self, store: GroupStore, sender: int, rank: int) -> None:
        self._store = store
        self._connected = group_backend() == "gloo"  # NCCL connects at the first operation
        name, size = store.group.sender_name(sender), store.group.receivers + 1
        connection = store.connection()
        self._backend = store.wait_for(lambda: _connect(connection, name, rank, size, store.group))

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast from rank 0; returns when all tensors have arrived."""
        try:
            for work in self._begin(tensors):
                self._store.wait_until(work.is_completed)
                work.wait()
        except RuntimeError as error:
            raise TransferError(f"weights did not arrive: {error}") from error

    def _begin(self, tensors: Sequence[Tensor]) -> list[dist.Work]:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0

        def begin() -> list[dist.Work]:
            return [self._backend.broadcast([tensor], options) for tensor in tensors]

        if self._connected:
            return begin()
        stream = torch.cuda.current_stream()

        def connect_and_begin() -> list[dist.Work]:
            with torch.cuda.stream(stream):
                return begin()

        works = self._store.wait_for(connect_and_begin)
        self._connected = True
        return works

    def close(self, *, abort: bool) -> None:
        """Leave; `abort`: without waiting for an operation under way."""
        if abort and torch.cuda.is_available():
            self._backend.abort()
        elif abort:
            _abandoned.append(self._backend)
        self._backend = None


def group_backend() -> str:
    """The backend of the process groups."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def _connect(store: dist.Store, name: str, rank: int, size: int, group: WeightGroup) -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    store = dist.PrefixStore(name, store)
    store = dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", store))
    timeout = timedelta(seconds=group.timeout)
    backends: Any = dist
    try:
        if device == "cuda":
            options = backends.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return backends.ProcessGroupNCCL(store, rank, size, options)
        options = backends.ProcessGroupGloo._Options()
        options._timeout = timeout
        address = _own_address(group.host)
        options._devices = [backends.ProcessGroupGloo.create_device(hostname=address)]
        return backends.ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        raise TransferError(f"the members of {name} did not connect: {error}") from error


def _own_address(host: str) -> str:
    """The address of this machine from which `host` is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        return probe.getsockname()[0]


class BroadcastSender(Sender):
    """The side of trainer rank number `number` of those that send."""

    def __init__(self, group: WeightGroup, number: int) -> None:
        super().__init__(group, number)
        self._channel = _Channel(self._store, number, rank=0)

    def _deliver(
        self, version: int, number: int, bucket: NamedTensors, specs: list[TensorSpec]
    ) -> None:
        self._store.announce(version, self._number, number, specs)
        self._channel.broadcast(self._pieces(bucket, specs))

    def _pieces(self, bucket: NamedTensors, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """The tensors to broadcast for a bucket: large ones as they are, small ones coalesced."""
        small = _small_ones(specs, self.group)
        tensors = [tensor for _, tensor in bucket]
        pieces = [tensor for tensor, is_small in zip(tensors, small, strict=True) if not is_small]
        if any(small):
            joined = list(compress(specs, small))
            size = sum(padded_sizes(joined))
            piece = torch.empty(size, dtype=torch.uint8, device=tensors[0].device)
            for place, tensor in zip(
                tensors_in(piece, joined), compress(tensors, small), strict=True
            ):
                place.copy_(tensor)
            pieces.append(piece)
        return pieces

    def close(self, *, abort: bool = False) -> None:
        """Leave the sender's process group."""
        self._channel.close(abort=abort)


def _small_ones(specs: Sequence[TensorSpec], group: WeightGroup) -> list[bool]:
    """Which tensors of a bucket are coalesced."""
    return [group.coalesces and spec.nbytes < _SMALL_BYTES for spec in specs]


class BroadcastReceiver(Receiver):
    """The side of worker `number` of all engines' workers.

    keeps: whether the consumer keeps the tensors; otherwise their memory is reused
    """

    def __init__(self, group: WeightGroup, number: int, *, keeps: bool = False) -> None:
        super().__init__(group)
        self._keeps = keeps
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._channels = [
            _Channel(self._store, sender, rank=1 + number) for sender in range(group.senders)
        ]

    def receive(self, version: int, take: Callable[[NamedTensors], None]) -> None:
        """Hand every bucket of `version` to `take`, after `barrier`."""
        for sender, specs in self._store.buckets(version):
            tensors, pieces = self._room_for(specs)
            self._channels[sender].broadcast(pieces)
            take([(spec.name, tensor) for spec, tensor in zip(specs, tensors, strict=True)])

    def _room_for(self, specs: Sequence[TensorSpec]) -> tuple[list[Tensor], list[Tensor]]:
        """Memory for the tensors of a bucket, and the pieces of it that are broadcast."""
        small = _small_ones(specs, self.group)
        joined = list(compress(specs, small))
        large = [spec for spec, is_small in zip(specs, small, strict=True) if not is_small]
        size = sum(padded_sizes(joined))
        needed = size + sum(padded_sizes(large))
        if self._memory.numel() < needed or self._keeps:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            self._memory = torch.empty(needed, dtype=torch.uint8, device=device)
        memory = self._memory
        pieces = tensors_in(memory[size:], large)
        of_small, of_large = iter(tensors_in(memory[:size], joined)), iter(pieces)
        tensors = [next(of_small if is_small else of_large) for is_small in small]
        return tensors, [*pieces, memory[:size]] if joined else pieces

    def close(self, *, abort: bool = False) -> None:
        """Leave the process groups of all senders."""
        for channel in self._channels:
            channel.close(abort=abort)
