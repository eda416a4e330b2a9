"""Weights over process groups: from the trainer's pipeline stages to the workers of all engines.

Every stage has a group with one sender, rank 0, and every worker as a receiver: gloo on CPU, NCCL
on CUDA. A stage sends its own tensors, bucket by bucket and one broadcast per tensor; the stages
take turns. What the next bucket holds is said through a store that the driver keeps. The driver
also notices who has died and writes that into the store, so that nobody waits for the dead: a
transfer that was cut off ends in a `TransferError` on every member, and is repeated with new
groups.

Keys in the store are those of torch's own groups, so that SGLang's servers can join.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

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

NamedTensors = Sequence[tuple[str, Tensor]]

#: gloo cannot end an operation that is under way, and its group cannot be freed before.
_abandoned: list[Any] = []


@dataclass(frozen=True)
class WeightGroup:
    """One set of senders and receivers, and where its members meet.

    host, port: of the driver's store
    name: of this set; after a loss the next one has another
    senders: pipeline stages of the trainer
    receivers: workers of all engines
    timeout: seconds that one operation may take
    """

    host: str
    port: int
    name: str
    senders: int
    receivers: int
    timeout: float

    def stage_name(self, stage: int) -> str:
        """The name of a stage's process group."""
        return f"{self.name}-{stage}"


@dataclass(frozen=True)
class TensorNote:
    """What a receiver must know of a tensor before it arrives."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


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
        with _store_errors():
            self.store = dist.TCPStore(
                group.host,
                group.port,
                is_master=False,
                timeout=timedelta(seconds=min(group.timeout, _CONNECT_SECONDS)),
            )

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

    def _check_aborted(self) -> None:
        now = time.monotonic()
        if now - self._checked < _ABORT_POLL_SECONDS:
            return
        self._checked = now
        key = _abort_key(self.group.name)
        if self.store.check([key]):
            raise TransferError(f"the transfer was called off: {self.store.get(key).decode()}")

    def announce(self, version: int, stage: int, number: int, notes: list[TensorNote]) -> None:
        """Say what bucket `number` of a stage holds; an empty one ends the stage."""
        rows = [[note.name, str(note.dtype).split(".")[-1], note.shape] for note in notes]
        with _store_errors():
            self.store.set(self._key(version, stage, number), json.dumps(rows))

    def announced(self, version: int, stage: int) -> Iterator[list[TensorNote]]:
        """The buckets of a stage as they are announced."""
        number = 0
        while True:
            key = self._key(version, stage, number)
            self.wait_until(lambda key=key: self.store.check([key]))  # type: ignore[misc]
            with _store_errors():
                rows = json.loads(self.store.get(key))
            if not rows:
                return
            yield [
                TensorNote(name, getattr(torch, kind), tuple(shape)) for name, kind, shape in rows
            ]
            number += 1

    def end_of(self, version: int, stage: int) -> str:
        """The key that is there once a stage has sent everything."""
        return f"{self.group.name}/{version}/{stage}/end"

    def _key(self, version: int, stage: int, number: int) -> str:
        return f"{self.group.name}/{version}/{stage}/{number}"


def _abort_key(name: str) -> str:
    return f"{name}/aborted"


def call_off(store: dist.Store, group: WeightGroup, reason: str) -> None:
    """End the transfers of a group on all its members; the driver's part."""
    store.set(_abort_key(group.name), reason)


def forget_version(
    store: dist.Store, group: WeightGroup, version: int, buckets: Mapping[int, int]
) -> None:
    """Remove what a complete version left in the store; `buckets` says how many by stage."""
    point = f"{group.name}/{version}"
    for stage, count in buckets.items():
        for number in range(count + 1):
            store.delete_key(f"{point}/{stage}/{number}")
        store.delete_key(f"{point}/{stage}/end")
    store.delete_key(f"{group.name}/version {version}")


class _StageGroup:
    """This process's place in the group of one stage."""

    def __init__(self, point: MeetingPoint, stage: int, rank: int) -> None:
        self._point = point
        group = point.group
        self._backend = _connect(
            point.store, group.stage_name(stage), rank, group.receivers + 1, group
        )

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """From rank 0 into the tensors of all others; returns when all are there."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            works = [self._backend.broadcast([tensor], options) for tensor in tensors]
            for work in works:
                self._point.wait_until(work.is_completed)
                work.wait()
        except RuntimeError as error:
            raise TransferError(f"weights did not arrive: {error}") from error

    def close(self, *, in_the_middle: bool) -> None:
        """Leave; `in_the_middle` of an operation, without waiting for it."""
        if in_the_middle and torch.cuda.is_available():
            self._backend.abort()
        elif in_the_middle:
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


class WeightSender:
    """One pipeline stage's end of a group."""

    def __init__(self, group: WeightGroup, stage: int) -> None:
        self._point, self._stage = MeetingPoint(group), stage
        self._point.meet("joined")
        self._channel = _StageGroup(self._point, stage, rank=0)

    @property
    def group(self) -> WeightGroup:
        """The group that it is a member of."""
        return self._point.group

    def send(
        self,
        version: int,
        named_tensors: Iterable[tuple[str, Tensor]],
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> tuple[int, int]:
        """Send all tensors of this stage as a part of `version`; how many bytes and buckets."""
        self._point.meet(f"version {version}")
        if self._stage > 0:
            before = self._point.end_of(version, self._stage - 1)
            self._point.wait_until(lambda: self._point.store.check([before]))
        total, buckets = 0, 0
        for bucket in _buckets(named_tensors, bucket_bytes):
            notes = [TensorNote(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket]
            self._point.announce(version, self._stage, buckets, notes)
            self._channel.broadcast([tensor for _, tensor in bucket])
            total += sum(note.nbytes for note in notes)
            buckets += 1
        self._point.announce(version, self._stage, buckets, [])
        with _store_errors():
            self._point.store.set(self._point.end_of(version, self._stage), "")
        return total, buckets

    def close(self, *, in_the_middle: bool = False) -> None:
        """Leave the group."""
        self._channel.close(in_the_middle=in_the_middle)


def _buckets(
    named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Tensors in lists of at most `bucket_bytes`, or of one."""
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named_tensors:
        if held and size + tensor.nbytes > bucket_bytes:
            yield held
            held, size = [], 0
        held.append((name, tensor.detach().contiguous()))
        size += tensor.nbytes
    if held:
        yield held


class WeightReceiver:
    """One engine worker's end of a group; worker `number` of all engines' workers.

    keeps: whether the taker keeps the tensors; otherwise their memory is used again for the next
    """

    def __init__(self, group: WeightGroup, number: int, *, keeps: bool = False) -> None:
        self._point, self._keeps = MeetingPoint(group), keeps
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._point.meet("joined")
        self._channels = [
            _StageGroup(self._point, stage, rank=1 + number) for stage in range(group.senders)
        ]

    @property
    def group(self) -> WeightGroup:
        """The group that it is a member of."""
        return self._point.group

    def meet(self, version: int) -> None:
        """Wait until every member is ready for `version`."""
        self._point.meet(f"version {version}")

    def receive(self, version: int, take: Callable[[NamedTensors], None]) -> None:
        """Hand every bucket of `version` to `take`, after `meet`."""
        for stage, channel in enumerate(self._channels):
            for notes in self._point.announced(version, stage):
                tensors = self._room_for(notes)
                channel.broadcast(tensors)
                take([(note.name, tensor) for note, tensor in zip(notes, tensors, strict=True)])

    def _room_for(self, notes: Sequence[TensorNote]) -> list[Tensor]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if self._keeps:
            return [torch.empty(note.shape, dtype=note.dtype, device=device) for note in notes]
        sizes = [-(-note.nbytes // _ALIGNMENT) * _ALIGNMENT for note in notes]
        if self._memory.numel() < sum(sizes):
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        parts = self._memory[: sum(sizes)].split(sizes)
        return [
            part[: note.nbytes].view(note.dtype).view(note.shape)
            for note, part in zip(notes, parts, strict=True)
        ]

    def close(self, *, in_the_middle: bool = False) -> None:
        """Leave the group."""
        for channel in self._channels:
            channel.close(in_the_middle=in_the_middle)


class Membership:
    """The sender or receiver of a process: kept from version to version, made anew for a new group.

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
            self.leave(in_the_middle=True)
            raise

    def leave(self, *, in_the_middle: bool = False) -> None:
        """Leave the group, if any."""
        if self._member is not None:
            self._member.close(in_the_middle=in_the_middle)
            self._member = None


@contextmanager
def _store_errors() -> Iterator[None]:
    """A store that cannot be reached ends the transfer."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        raise TransferError(f"the driver's store cannot be reached: {error}") from error


def group_as_mapping(group: WeightGroup) -> Mapping[str, Any]:
    """The group as plain values, for processes that are told of it in JSON."""
    return dict(vars(group))
