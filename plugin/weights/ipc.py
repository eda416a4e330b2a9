"""Weights within a device: the engine's worker reads memory of the trainer rank beside it.

For engines that share the trainer's devices (`--colocate`), whose processes cannot join one NCCL
group. The rank copies a bucket into an `IpcBuffer` and announces its handle; the workers on its
device load the bucket, let the memory go and acknowledge it. There are two buffers: the rank
gathers and copies the next bucket while the workers load the last one. After the last bucket they
are given up. A rank that waits for a worker which has died is released by
the driver's abort, as in every transfer.

On GPUs the memory is shared by CUDA IPC. On CPU it is a file that exists in memory only and has no
name in any directory: it is gone when the last process that has it open closes it or dies, so
nothing can be left behind. Handles are plain values, fit for JSON.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plugin.errors import TransferError
from plugin.weights.announced import Announcements, AnnouncingSender
from plugin.weights.buckets import BUCKET_BYTES
from plugin.weights.group import (
    KeyStore,
    Receiver,
    WeightGroup,
    connected,
    open_store,
    store_errors,
)
from plugin.weights.lane import own_address
from plugin.weights.tensor_layout import NamedTensors, TensorSpec, padded_sizes, tensors_in

_FILE = "megatron-tis-weights-"
#: Buffers of a rank.
_BUFFERS = 2


def device_id() -> str:
    """An id shared by processes that can read each other's memory.

    That is a GPU; on CPU a running kernel and its process numbers, which a container may have of
    its own.
    """
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


class IpcBuffer:
    """Bytes that others can open by `handle` until `close`.

    tensor: [nbytes] uint8
    """

    def __init__(self, nbytes: int) -> None:
        self._file: int | None = None
        if torch.cuda.is_available():
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
            shared = self.tensor.untyped_storage()._share_cuda_()
            self.handle: list[Any] = [v.hex() if isinstance(v, bytes) else v for v in shared]
            return
        name = _FILE + secrets.token_hex(6)
        self._file = os.memfd_create(name)
        os.ftruncate(self._file, max(nbytes, 1))
        self.tensor = torch.frombuffer(mmap.mmap(self._file, 0), dtype=torch.uint8)
        self.handle = [os.getpid(), self._file, name]

    def close(self) -> None:
        """Free the memory; on CPU processes that have it open keep it until they close it."""
        del self.tensor
        if self._file is not None:
            os.close(self._file)
            self._file = None
        else:
            # Memory that an engine had open when it died stays with torch until this rank ends.
            torch.cuda.ipc_collect()

    @staticmethod
    def open(handle: list[Any]) -> Tensor:
        """The bytes behind a handle; on CPU changes are private to this process."""
        if torch.cuda.is_available():
            _, memory, size, offset, counter, counter_offset, event, sync = handle
            storage = torch.UntypedStorage._new_shared_cuda(
                torch.cuda.current_device(),
                bytes.fromhex(memory),
                *(size, offset, bytes.fromhex(counter), counter_offset, bytes.fromhex(event), sync),
            )
            return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
        owner, number, name = handle
        path = f"/proc/{owner}/fd/{number}"
        try:
            # The number of a dead process may be another one's by now.
            if os.readlink(path) != f"/memfd:{name} (deleted)":
                raise FileNotFoundError(path)
            file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise TransferError(
                f"process {owner} lends no memory {name} any more: {error}"
            ) from error
        try:
            private = mmap.mmap(file, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(file)
        return torch.frombuffer(private, dtype=torch.uint8)


class IpcSender(AnnouncingSender):
    """The side of trainer rank `rank`."""

    bucket_bytes = BUCKET_BYTES // _BUFFERS

    def __init__(self, group: WeightGroup, rank: int) -> None:
        super().__init__(group, rank)
        # Its own, because a large model has more buckets than the driver could pass on.
        address = own_address(group.host)
        with store_errors():
            self._own = open_store(address)
        store = KeyStore(self._own, self._store.waits, group.timeout)
        self._announcements = Announcements(store, group.name)
        self._store.set(_place_of_store(group, rank), f"{address}:{self._own.port}")
        self._free: list[IpcBuffer] = []
        #: Buffers that the workers read, with the numbers of their messages.
        self._lent: deque[tuple[int, IpcBuffer]] = deque()

    def _deliver(self, version: int, number: int, bucket: NamedTensors) -> None:
        specs = [TensorSpec.of(name, tensor) for name, tensor in bucket]
        if len(self._lent) == _BUFFERS:
            self._take_back(version)
        buffer = self._buffer_of(sum(padded_sizes(specs)))
        self._lent.append((number, buffer))
        _fill(buffer, bucket, specs)
        self._announcements.put(version, self._number, number, specs, buffer.handle)

    def _buffer_of(self, size: int) -> IpcBuffer:
        """A free buffer that is large enough, or a new one in its place."""
        if self._free and self._free[0].tensor.numel() >= size:
            return self._free.pop()
        if self._free:
            self._free.pop().close()
        return IpcBuffer(size)

    def _take_back(self, version: int) -> None:
        """Wait until the workers have loaded the oldest buffer."""
        self._announcements.wait_for_acks(version, self._number, self._lent[0][0])
        self._free.append(self._lent.popleft()[1])

    def _finish_version(self, version: int) -> None:
        while self._lent:
            self._take_back(version)

    def _end_version(self) -> None:
        buffers = [*self._free, *(buffer for _, buffer in self._lent)]
        self._free, self._lent = [], deque()
        while buffers:
            buffers.pop().close()

    def _announce_end(self, version: int, number: int) -> int:
        self._announcements.put(version, self._number, number, None)
        # This rank may leave the group after that, and its store with it.
        self._announcements.wait_for_acks(version, self._number, number)
        return 0


def _place_of_store(group: WeightGroup, rank: int) -> str:
    """The key of the address of a rank's own store."""
    return f"{group.name}/store of {rank}"


class IpcReceiver(Receiver):
    """The side of worker `number` of all engines' workers.

    keeps: whether the consumer keeps the tensors, which then are copies
    """

    def __init__(self, group: WeightGroup, number: int, *, keeps: bool = False) -> None:
        super().__init__(group)
        self._source, self._number, self._keeps = group.ipc_ranks[number], number, keeps
        place = self._store.get(_place_of_store(group, self._source)).decode()
        host, _, port = place.rpartition(":")
        # A rank that has died since is tried again and again by torch.
        store = self._store.waits.result_of(lambda: connected(host, int(port), group.timeout))
        keys = KeyStore(store, self._store.waits, group.timeout)
        self._announcements = Announcements(keys, group.name)

    def barrier(self, version: int) -> None:
        """Say that the engine is ready; what the rank announces first says that it is."""
        self._store.engine_is_ready(version, self._number)

    def receive(self, version: int, take: Callable[[NamedTensors], None]) -> None:
        """Hand every bucket of `version` to `take`, after `barrier`."""
        announced = self._announcements.read(version, self._source)
        readers = self.group.ipc_ranks.count(self._source)
        count = 0
        for number, (specs, handle) in enumerate(announced):
            tensors = tensors_in(IpcBuffer.open(handle), specs)
            if self._keeps:
                tensors = [tensor.clone() for tensor in tensors]
            take([(spec.name, tensor) for spec, tensor in zip(specs, tensors, strict=True)])
            _finish_copies()
            del tensors
            self._announcements.ack(version, self._source, number, readers)
            count = number + 1
        self._announcements.ack(version, self._source, count, readers)


def _fill(memory: IpcBuffer, bucket: NamedTensors, specs: list[TensorSpec]) -> None:
    """Copy a bucket into the shared memory.

    A function of its own, because an error's traceback would keep views of the memory alive.
    """
    for (_, tensor), place in zip(bucket, tensors_in(memory.tensor, specs), strict=True):
        place.copy_(tensor)
    _finish_copies()


def _finish_copies() -> None:
    """Wait for copies on the GPU: the other process does not see this one's streams."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
