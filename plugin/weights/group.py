"""A weight group: who sends weights to whom, the store at which they meet, and its members.

The driver keeps a small store (TCP). Members meet there, and engines say that they are ready. The
driver notices who has died and writes an abort into the store, on which every member waits, so that
nobody waits for the dead: the transfer ends in a `TransferError` on every member, and is repeated
by a new group.
"""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from plugin.errors import TransferError
from plugin.weights.manifest import Manifest
from plugin.weights.tensor_layout import NamedTensors
from plugin.weights.waiting import Waits

_CONNECT_SECONDS = 120.0
#: After so long a member that has left lets go of the store.
_WATCH = timedelta(seconds=60)


@dataclass(frozen=True)
class WeightGroup:
    """One set of senders and receivers, and the store at which they meet.

    host, port: of the driver's store
    name: of this set; after a loss the next one has another
    senders: trainer ranks that send
    receivers: workers of all engines
    timeout: seconds that one operation may take
    per_stage: senders of a pipeline stage, from which receivers take buckets in turns
    per_lane: senders that share a process group, or lane: 1, or those of a stage
    firsts: numbers of the receivers that speak for their engine; empty: each is one of its own
    ipc_ranks: IPC: the rank whose memory each receiver reads; empty for a broadcast
    to_servers: one broadcast per tensor, described in the store; a server gets no more
    """

    host: str
    port: int
    name: str
    senders: int
    receivers: int
    timeout: float
    per_stage: int = 1
    per_lane: int = 1
    firsts: tuple[int, ...] = ()
    ipc_ranks: tuple[int, ...] = ()
    to_servers: bool = False

    @property
    def lanes(self) -> int:
        """How many process groups there are."""
        return self.senders // self.per_lane

    @property
    def engines(self) -> int:
        """How many receivers have to be ready before a version begins."""
        return len(self.firsts) or self.receivers

    def lane_name(self, lane: int) -> str:
        """The name of a process group."""
        return f"{self.name}-{lane}"


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


class KeyStore:
    """A connection to a store, whose waits end with the transfer."""

    def __init__(self, store: dist.Store, waits: Waits, timeout: float) -> None:
        self.store, self.waits = store, waits
        self._timeout = timedelta(seconds=timeout)

    def set(self, key: str, value: str) -> None:
        """Write a key."""
        with store_errors():
            self.store.set(key, value)

    def get(self, key: str) -> bytes:
        """What is at `key`, once it is there."""

        def get() -> bytes:
            with store_errors():
                self.store.wait([key], self._timeout)
                return self.store.get(key)

        return self.waits.result_of(get)

    def delete(self, key: str) -> None:
        """Remove a key."""

        def delete() -> None:
            with store_errors():
                self.store.delete_key(key)

        self.waits.result_of(delete)

    def arrive(self, key: str, members: int, everyone: int) -> None:
        """Count so many of `everyone`; the last one writes `key`."""

        def arrive() -> None:
            with store_errors():
                if self.store.add(f"{key}/count", members) >= everyone:
                    # Last: who waits for the key may end the store.
                    self.store.delete_key(f"{key}/count")
                    self.store.set(key, "")

        # The process that has the store may be stopped.
        self.waits.result_of(arrive)


def connected(host: str, port: int, timeout: float) -> dist.TCPStore:
    """A connection to a store."""
    limit = timedelta(seconds=min(timeout, _CONNECT_SECONDS))
    with store_errors():
        return dist.TCPStore(host, port, is_master=False, timeout=limit)


class GroupStore(KeyStore):
    """One member's view of the driver's store: a connection, and one that waits for an abort."""

    def __init__(self, group: WeightGroup) -> None:
        self.group = group
        place = (group.host, group.port, group.timeout)
        super().__init__(connected(*place), Waits(group.timeout), group.timeout)
        watch = (group, connected(*place), self.waits)
        threading.Thread(target=_watch_for_abort, args=watch, daemon=True).start()

    def barrier(self, what: str, members: int = 1) -> None:
        """Wait until all members of the group are here; the caller counts as `members` of them."""
        key = f"{self.group.name}/{what}"
        self.arrive(key, members, self.group.senders + self.group.receivers)
        self.get(key)

    def engine_is_ready(self, version: int, receiver: int) -> None:
        """Say that an engine waits for `version`, if `receiver` speaks for it."""
        if not self.group.firsts or receiver in self.group.firsts:
            self.arrive(f"{self.group.name}/version {version}", 1, self.group.engines)

    def wait_for_engines(self, version: int) -> None:
        """Wait until all engines are ready for `version`."""
        self.get(f"{self.group.name}/version {version}")


def _watch_for_abort(group: WeightGroup, store: dist.TCPStore, waits: Waits) -> None:
    """End a member's waits when the driver aborts the transfer, or is gone itself."""
    key = f"{group.name}/aborted"
    while not waits.have_ended:
        try:
            store.wait([key], _WATCH)
            waits.end(f"the transfer was aborted: {store.get(key).decode()}")
        except dist.DistStoreError:  # nothing happened for so long
            continue
        except (dist.DistError, RuntimeError) as error:
            waits.end(f"the driver's store cannot be reached: {error}")


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
def store_errors() -> Iterator[None]:
    """A store that cannot be reached ends the transfer."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        raise TransferError(f"the store of the transfer cannot be reached: {error}") from error


class _Member(ABC):  # noqa: B024
    """One process's place in a group, which it has joined."""

    def __init__(self, group: WeightGroup) -> None:
        self._store = GroupStore(group)
        self._store.barrier("joined")

    @property
    def group(self) -> WeightGroup:
        """The group that it is a member of."""
        return self._store.group

    def close(self, *, abort: bool = False) -> None:
        """Leave the group; `abort`: without waiting for an operation under way."""
        self._store.waits.end("this member has left")


class Sender(_Member):
    """A trainer rank's side of a group; `number` is what it is known by."""

    def __init__(self, group: WeightGroup, number: int) -> None:
        super().__init__(group)
        self._number = number

    @abstractmethod
    def send(
        self,
        version: int,
        part: Iterable[tuple[str, Tensor] | None],
        manifest: Manifest | None = None,
    ) -> tuple[int, int]:
        """Send this rank's part of `version`; how many bytes, and messages in the store.

        part: tensors by name; None ends a round
        manifest: of `part`, for transports whose receivers have to know it
        """


class Receiver(_Member):
    """An engine worker's side of a group."""

    @abstractmethod
    def barrier(self, version: int) -> None:
        """Wait until `version` can begin."""

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
