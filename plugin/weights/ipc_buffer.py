"""Memory of a device that one process lends to others on the same device.

On GPUs by CUDA IPC. On CPU by a file that exists in memory only and has no name in any directory:
it is gone when the last process that has it open closes it or dies, so nothing can be left behind.
Handles are plain values, fit for JSON.
"""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plugin.errors import TransferError

_FILE = "megatron-tis-weights-"


def device_id() -> str:
    """What processes have in common that can lend memory to each other.

    That is a GPU; on CPU a running kernel and its process numbers, which a container may have of
    its own.
    """
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


class LentMemory:
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
        """Give the memory up; on CPU those who have opened it keep it until they let it go."""
        del self.tensor
        if self._file is not None:
            os.close(self._file)
            self._file = None
        else:
            # Memory that an engine had open when it died stays with torch until this rank ends.
            torch.cuda.ipc_collect()


def borrowed(handle: list[Any]) -> Tensor:
    """The bytes behind a handle; on CPU a change of them is not seen by the lender."""
    if torch.cuda.is_available():
        _, memory, size, offset, counter, counter_offset, event, sync = handle
        storage = torch.UntypedStorage._new_shared_cuda(
            torch.cuda.current_device(),
            bytes.fromhex(memory),
            *(size, offset, bytes.fromhex(counter), counter_offset, bytes.fromhex(event), sync),
        )
        return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
    lender, number, name = handle
    path = f"/proc/{lender}/fd/{number}"
    try:
        # The number of a dead process may be another one's by now.
        if os.readlink(path) != f"/memfd:{name} (deleted)":
            raise FileNotFoundError(path)
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise TransferError(f"process {lender} lends no memory {name} any more: {error}") from error
    try:
        private = mmap.mmap(file, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(file)
    return torch.frombuffer(private, dtype=torch.uint8)
