"""Where trainer ranks and engine workers meet to hand over weights, and what they tell each other.

The driver keeps a small store (TCP). Members count themselves in, and senders announce what comes
next. The driver notices who has died and writes into the store that the transfer is called off, so
that nobody waits for the dead: it ends in a `TransferError` on every member, and is repeated by a
new group.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from plugin.errors import TransferError

#: Of the tensors that are on their way at the same time, unless one alone is larger.
BUCKET_BYTES = 256 << 20
_CONNECT_SECONDS = 120.0
_ABORT_POLL_SECONDS = 0.1
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1e-4, 5e-3
_ALIGNMENT = 64

T = TypeVar("T")
NamedTensors = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True)
class WeightGroup:
    """One set of senders and receivers, and where its members meet.

    host, port: of the driver's store
    name: of this set; after a loss the next one has another
    senders: trainer ranks that send
    receivers: workers of all engines
    timeout: seconds that one operation may take
    per_stage: senders of a pipeline stage, which take turns layer by layer; the next stage follows
    lenders: handing over within devices: the rank whose memory each receiver reads; else empty
    joins: the small tensors of a bucket travel as one; servers expect one broadcast per tensor
    """

    host: str
    port: int
    name: str
    senders: int
    receivers: int
    timeout: float
    per_stage: int = 1
    lenders: tuple[int, ...] = ()
    joins: bool = True

    def sender_name(self, sender: int) -> str:
        """The name of a sender's process group."""
        return f"{self.name}-{sender}"


@dataclass(frozen=True)
class TensorNote:
    """What a receiver must know of a tensor before it arrives."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, bucket: NamedTensors) -> list[TensorNote]:
        """The notes of a bucket."""
        return [cls(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket]

    @property
    def nbytes(self) -> int:
        """Size of the tensor."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def padded_sizes(notes: Sequence[TensorNote]) -> list[int]:
    """The bytes that every tensor takes in memory that holds several."""
    return [-(-note.nbytes // _ALIGNMENT) * _ALIGNMENT for note in notes]


def tensors_in(memory: Tensor, notes: Sequence[TensorNote]) -> list[Tensor]:
    """The tensors of `notes`, one after the other in `memory` [bytes]."""
    sizes = padded_sizes(notes)
    parts = memory[: sum(sizes)].split(sizes)
    return [
        part[: note.nbytes].view(note.dtype).view(note.shape)
        for note, part in zip(notes, parts, strict=True)
    ]


def open_store(address: str) -> dist.TCPStore:
    """A store that listens on `address` only; torch's own would listen on every interface."""
    listener = socket.socket()
    listener.bind((address, 0))
    listener.listen()
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


class MeetingPoint:
    """One member's view of the driver's store."""

    def __init__(self, group: WeightGroup) -> None:
        self.group = group
        self._checked = 0.0
        self.store = self.connection()

    def connection(self) -> dist.TCPStore:
        """A further connection to the store; one of them serves one thread at a time."""
        timeout = timedelta(seconds=min(self.group.timeout, _CONNECT_SECONDS))
        with _store_errors():
            return dist.TCPStore(self.group.host, self.group.port, is_master=False, timeout=timeout)

    def meet(self, what: str, members: int = 1) -> None:
        """Wait until all members of the group have come; `members` of them are this caller's."""
        key, everyone = f"{self.group.name}/{what}", self.group.senders + self.group.receivers
        with _store_errors():
            self.store.add(key, members)
        self.wait_until(lambda: self.store.add(key, 0) >= everyone)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`; a `TransferError` once the driver has called the transfer off."""
        pause = _SHORTEST_PAUSE
        with _store_errors():
            while not condition():
                self._check_aborted()
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def wait_for(self, work: Callable[[], T]) -> T:
        """The result of `work`, which blocks; once called off, a thread goes on with it unseen."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        self.wait_until(result.done)
        return result.result()

    def _check_aborted(self) -> None:
        now = time.monotonic()
        if now - self._checked < _ABORT_POLL_SECONDS:
            return
        self._checked = now
        key = _abort_key(self.group.name)
        if self.store.check([key]):
            raise TransferError(f"the transfer was called off: {self.store.get(key).decode()}")

    def announce(
        self,
        version: int,
        sender: int,
        number: int,
        bucket: Sequence[TensorNote] | None,
        handle: Sequence[Any] = (),
    ) -> None:
        """Say what message `number` of a sender is.

        bucket: empty = the end of a round of turns; None = the sender has sent everything
        handle: of the memory that holds the bucket, where that is lent
        """
        message: Any = None
        if bucket is not None:
            rows = [[note.name, str(note.dtype).split(".")[-1], note.shape] for note in bucket]
            message = [rows, list(handle)]
        with _store_errors():
            self.store.set(self._key(version, sender, number), json.dumps(message))

    def announced(self, version: int, sender: int) -> Iterator[tuple[list[TensorNote], list[Any]]]:
        """What a sender announces, with its handles, up to its end."""
        number = 0
        while True:
            key = self._key(version, sender, number)
            self.wait_until(lambda key=key: self.store.check([key]))  # type: ignore[misc]
            with _store_errors():
                message = json.loads(self.store.get(key))
            if message is None:
                return
            rows, handle = message
            notes = [TensorNote(name, getattr(torch, kind), tuple(s)) for name, kind, s in rows]
            yield notes, handle
            number += 1

    def say_taken(self, version: int, sender: int, number: int) -> None:
        """Say that a receiver has let the memory of a bucket go."""
        with _store_errors():
            self.store.add(f"{self._key(version, sender, number)}/taken", 1)

    def wait_until_taken(self, version: int, sender: int, number: int, receivers: int) -> None:
        """Wait until so many receivers have let the memory of a bucket go."""
        key = f"{self._key(version, sender, number)}/taken"
        self.wait_until(lambda: self.store.add(key, 0) >= receivers)
        with _store_errors():
            self.store.delete_key(key)

    def buckets(self, version: int) -> Iterator[tuple[int, list[TensorNote]]]:
        """Sender and content of every bucket of a version, in the order of the senders' turns."""
        size = self.group.per_stage
        for first in range(0, self.group.senders, size):
            open_senders = {
                sender: self.announced(version, sender) for sender in range(first, first + size)
            }
            while open_senders:
                for sender, announced in list(open_senders.items()):
                    for notes, _ in announced:
                        if not notes:
                            break
                        yield sender, notes
                    else:
                        del open_senders[sender]

    def _key(self, version: int, sender: int, number: int) -> str:
        return f"{self.group.name}/{version}/{sender}/{number}"


def _abort_key(name: str) -> str:
    return f"{name}/aborted"


def call_off(store: dist.Store, group: WeightGroup, reason: str) -> None:
    """End the transfers of a group on all its members; the driver's part."""
    store.set(_abort_key(group.name), reason)


def forget_version(
    store: dist.Store, group: WeightGroup, version: int, messages: Mapping[int, int]
) -> None:
    """Remove what a complete version left in the store; `messages` says how many by sender."""
    for sender, count in messages.items():
        for number in range(count):
            store.delete_key(f"{group.name}/{version}/{sender}/{number}")
    store.delete_key(f"{group.name}/version {version}")


@contextmanager
def _store_errors() -> Iterator[None]:
    """A store that cannot be reached ends the transfer."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        raise TransferError(f"the driver's store cannot be reached: {error}") from error
