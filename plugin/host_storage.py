"""Device memory that another process uses for a while; the values wait in host memory meanwhile."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class _Parked:
    """A storage without memory; `values` is None where they are not kept and come back as 0."""

    storage: torch.UntypedStorage
    size: int
    values: Tensor | None


class HostStorage:
    """Takes the memory of tensors away and gives it back; the tensors and their views stay valid.

    tensors: lists them anew each time, because optimizers make some of theirs late
    keeps_values: whether values are kept in host memory (pinned, of tensors on a GPU)
    """

    def __init__(
        self, tensors: Callable[[], Iterable[Tensor]], *, keeps_values: bool = True
    ) -> None:
        self._tensors, self._keeps_values = tensors, keeps_values
        self._parked: list[_Parked] = []
        # Locking pages takes about as long as copying them, so they are kept for the next time.
        self._pinned: list[Tensor] = []

    @property
    def is_parked(self) -> bool:
        """Whether the memory is gone."""
        return bool(self._parked)

    def park(self) -> int:
        """Give the memory up, return its bytes; nothing has changed if this raises.

        Does nothing while parked.
        """
        if self._parked:
            return 0
        found = [
            _Parked(storage, storage.nbytes(), self._copy(storage) if self._keeps_values else None)
            for storage in _storages(self._tensors())
        ]
        self._parked = found
        for item in found:
            item.storage.resize_(0)
        if any(item.storage.device.type == "cuda" for item in found):
            torch.cuda.empty_cache()  # what torch keeps, another process cannot have
        return sum(item.size for item in found)

    def restore(self) -> None:
        """Take memory again, with the old values; everything stays parked if this raises."""
        try:
            for item in self._parked:
                item.storage.resize_(item.size)
        except BaseException:
            for item in self._parked:
                item.storage.resize_(0)
            raise
        for item in self._parked:
            whole = _bytes_of(item.storage)
            if item.values is None:
                whole.zero_()
            else:
                whole.copy_(item.values)
                if whole.is_cuda:
                    self._pinned.append(item.values)
        self._parked = []

    def _copy(self, storage: torch.UntypedStorage) -> Tensor:
        """The values of a storage in host memory."""
        host = next((held for held in self._pinned if held.numel() == storage.nbytes()), None)
        if host is not None:
            self._pinned = [held for held in self._pinned if held is not host]
        else:
            host = _host_memory(storage)
        return host.copy_(_bytes_of(storage))


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages behind the tensors, each once; without those that cannot be resized.

    Where there is a GPU, what is in host memory stays there.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.device.type == device and storage.nbytes() and storage.resizable():
            found[storage.data_ptr()] = storage
    return list(found.values())


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_memory(storage: torch.UntypedStorage) -> Tensor:
    """[nbytes] uint8, with its pages locked where `storage` is on a GPU.

    torch's allocator of pinned memory rounds up to powers of two: 33 GB would take 64.
    """
    memory = torch.empty(storage.nbytes(), dtype=torch.uint8)
    if storage.device.type == "cuda":
        runtime: Any = torch.cuda.cudart()
        address = memory.data_ptr()
        # Where the system refuses, copies are slower.
        if int(runtime.cudaHostRegister(address, memory.numel(), 0)) == 0:
            unlock = weakref.finalize(memory, runtime.cudaHostUnregister, address)
            unlock.atexit = False
    return memory


class SleepingModel:
    """The memory of a module that sleeps and wakes."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = HostStorage(lambda: itertools.chain(model.parameters(), model.buffers()))
        self._buffers = HostStorage(model.buffers)
        self._dropped = HostStorage(model.parameters, keeps_values=False)

    def sleep(self, level: int) -> None:
        """Give up parameters and buffers; level 2 does not keep the values of parameters."""
        if self._kept.is_parked or self._dropped.is_parked:
            return
        if level == 1:
            self._kept.park()
        else:
            # Buffers first: where one shares its memory with a parameter its values are kept.
            self._buffers.park()
            self._dropped.park()

    def wake(self) -> None:
        """Take their memory again; after level 2 the parameters are 0."""
        for storage in (self._kept, self._dropped, self._buffers):
            storage.restore()
