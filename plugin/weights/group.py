"""A weight group: who sends weights to whom, the store at which they meet, and its members.

The driver keeps a small store (TCP). Members count themselves in at barriers, and senders announce
what comes next. The driver notices who has died and writes an abort into the store, so that nobody
waits for the dead: the transfer ends in a `TransferError` on every member, and is repeated by a new
group.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from plugin.errors import TransferError
from plugin.weights.buckets import BUCKET_BYTES, cut_buckets

_CONNECT_SECONDS = 120.0
_ABORT_POLL_SECONDS = 0.1
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1e-4, 5e-3
_ALIGNMENT = 64

T = TypeVar("T")
NamedTensors = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True)
class WeightGroup:
    """One set of senders and receivers, and the store at which they meet.

    host, port: of the driver's store
    name: of this set; after a loss the next one has another
    senders: trainer ranks that send
    receivers: workers of all engines
    timeout: seconds that one operation may take
    per_stage: senders of a pipeline stage, which take turns layer by layer; the next stage follows
    ipc_ranks: IPC: the rank whose memory each receiver reads; empty for a broadcast
    coalesces: the small tensors of a bucket travel as one; servers expect one broadcast per tensor
    """

    host: str
    port: int
    name: str
    senders: int
    receivers: int
    timeout: float
    per_stage: int = 1
    ipc_ranks: tuple[int, ...] = ()
    coalesces: bool = True

    def sender_name(self, sender: int) -> str:
        """The name of a sender's process group."""
        return f"{self.name}-{sender}"


@dataclass(frozen=True)
class TensorSpec:
    """What a receiver must know of a tensor before it arrives."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, bucket: NamedTensors) -> list[TensorSpec]:
        """The specs of a bucket's tensors."""
        return [cls(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket]

    @property
    def nbytes(self) -> int:
        """Size of the tensor."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def padded_sizes(specs: Sequence[TensorSpec]) -> list[int]:
    """The bytes that every tensor takes in memory that holds several."""
    return [-(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT for spec in specs]


def tensors_in(memory: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """The tensors of `specs`, one after the other in `memory` [bytes]."""
    sizes = padded_sizes(specs)
    parts = memory[: sum(sizes)].split(sizes)
    return [
        part[: spec.nbytes].view(spec.dtype).view(spec.shape)
        for spec, part in zip(specs, parts, strict=True)
    ]


def open_store(address: str, **options: Any) -> dist.TCPStore:
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
        **options,
    )


class GroupStore:
    """One member's view of the driver's store."""

    def __init__(self, group: WeightGroup) -> None:
        self.group = group
        self._checked = 0.0
        self.store = self.connection()

    def connection(self) -> dist.TCPStore:
        """Another connection to the store; each serves one thread at a time."""
        timeout = timedelta(seconds=min(self.group.timeout, _CONNECT_SECONDS))
        with _store_errors():
            return dist.TCPStore(self.group.host, self.group.port, is_master=False, timeout=timeout)

    def barrier(self, what: str, members: int = 1) -> None:
        """Wait until all members of the group are here; the caller counts as `members` of them."""
        key, everyone = f"{self.group.name}/{what}", self.group.senders + self.group.receivers
        with _store_errors():
            self.store.add(key, members)
        self.wait_until(lambda: self.store.add(key, 0) >= everyone)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`; a `TransferError` once the driver has aborted the transfer."""
        pause = _SHORTEST_PAUSE
        with _store_errors():
            while not condition():
                self._check_aborted()
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def wait_for(self, work: Callable[[], T]) -> T:
        """The result of blocking `work`; after an abort its thread is abandoned."""
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
        key = f"{self.group.name}/aborted"
        if self.store.check([key]):
            raise TransferError(f"the transfer was called off: {self.store.get(key).decode()}")

    def announce(
        self,
        version: int,
        sender: int,
        number: int,
        bucket: Sequence[TensorSpec] | None,
        handle: Sequence[Any] = (),
    ) -> None:
        """Announce what message `number` of a sender is.

        bucket: empty = the end of a round of turns; None = the sender has sent everything
        handle: IPC: of the memory that holds the bucket
        """
        message: Any = None
        if bucket is not None:
            rows = [[spec.name, str(spec.dtype).split(".")[-1], spec.shape] for spec in bucket]
            message = [rows, list(handle)]
        with _store_errors():
            self.store.set(self._key(version, sender, number), json.dumps(message))

    def announced(self, version: int, sender: int) -> Iterator[tuple[list[TensorSpec], list[Any]]]:
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
            specs = [TensorSpec(name, getattr(torch, kind), tuple(s)) for name, kind, s in rows]
            yield specs, handle
            number += 1

    def ack(self, version: int, sender: int, number: int) -> None:
        """Acknowledge a bucket: this receiver no longer uses its memory."""
        with _store_errors():
            self.store.add(f"{self._key(version, sender, number)}/acks", 1)

    def wait_for_acks(self, version: int, sender: int, number: int, receivers: int) -> None:
        """Wait until `receivers` receivers have acknowledged a bucket."""
        key = f"{self._key(version, sender, number)}/acks"
        self.wait_until(lambda: self.store.add(key, 0) >= receivers)
        with _store_errors():
            self.store.delete_key(key)

    def buckets(self, version: int) -> Iterator[tuple[int, list[TensorSpec]]]:
        """Sender and content of every bucket of a version, in the order of the senders' turns."""
        size = self.group.per_stage
        for first in range(0, self.group.senders, size):
            open_senders = {
                sender: self.announced(version, sender) for sender in range(first, first + size)
            }
            while open_senders:
                for sender, announced in list(open_senders.items()):
                    for specs, _ in announced:
                        if not specs:
                            break
                        yield sender, specs
                    else:
                        del open_senders[sender]

    def _key(self, version: int, sender: int, number: int) -> str:
        return f"{self.group.name}/{version}/{sender}/{number}"


def abort(store: dist.Store, group: WeightGroup, reason: str) -> None:
    """End the transfers of a group on all its members; the driver's part."""
    store.set(f"{group.name}/aborted", reason)


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


class _Member(ABC):  # noqa: B024
    """One process's place in a group, which it has joined."""

    def __init__(self, group: WeightGroup) -> None:
        self._store = GroupStore(group)
        self._store.barrier("joined")

    @property
    def group(self) -> WeightGroup:
        """The group that it is a member of."""
        return self._store.group

    def barrier(self, version: int) -> None:
        """Wait until every member is ready for `version`."""
        self._store.barrier(f"version {version}")

    def close(self, *, abort: bool = False) -> None:  # noqa: B027
        """Leave the group; `abort`: without waiting for an operation under way."""


class Sender(_Member):
    """A trainer rank's side of a group; `number` is what it announces under.

    takes_turns: receivers take this sender and others in turns, and so need the end of each round
    """

    takes_turns = True

    def __init__(self, group: WeightGroup, number: int) -> None:
        super().__init__(group)
        self._number = number

    def send(
        self,
        version: int,
        part: Iterable[tuple[str, Tensor] | None],
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> tuple[int, int]:
        """Send this rank's part of `version`; how many bytes and messages.

        part: tensors by name; None ends a round of turns
        """
        self.barrier(version)
        total, messages = 0, 0
        try:
            for bucket in cut_buckets(part, bucket_bytes):
                if not bucket and not self.takes_turns:
                    continue
                specs = TensorSpec.of(bucket)
                self._deliver(version, messages, bucket, specs)
                total += sum(spec.nbytes for spec in specs)
                messages += 1
        finally:
            self._end_version()
        self._store.announce(version, self._number, messages, None)
        return total, messages + 1

    @abstractmethod
    def _deliver(
        self, version: int, number: int, bucket: NamedTensors, specs: list[TensorSpec]
    ) -> None:
        """Announce a bucket as message `number` and get it to the receivers."""

    def _end_version(self) -> None:
        """Free what sending a version needed, complete or not."""


class Receiver(_Member):
    """An engine worker's side of a group."""

    @abstractmethod
    def receive(self, version: int, take: Callable[[NamedTensors], None]) -> None:
        """Hand every bucket of `version` to `take`, after `barrier`."""


class Membership:
    """The sender or receiver of a process, kept between versions and replaced for a new group.

    After an error it has left its group.
    """

    def __init__(self) -> None:
        self._member: Any = None

    @contextmanager
    def of(self, group: WeightGroup, join: Callable[[], Any]) -> Iterator[Any]:
        """The member of `group`, made by `join` if there is none yet."""
        try:
            if self._member is None or self._member.group != group:
                self.leave()
                self._member = join()
            yield self._member
        except BaseException:
            self.leave(abort=True)
            raise

    def leave(self, *, abort: bool = False) -> None:
        """Leave the group, if any."""
        if self._member is not None:
            self._member.close(abort=abort)
            self._member = None
