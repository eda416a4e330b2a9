"""Senders that announce every bucket, because nobody reads a lane for it.

Servers take one broadcast per bucket and are told of it by HTTP; workers beside a rank read its
memory (`ipc`).
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from threading import Event
from typing import Any

from torch import Tensor

from plugin.weights.buckets import BUCKET_BYTES, cut_buckets
from plugin.weights.group import KeyStore, Sender, WeightGroup
from plugin.weights.lane import Buffers, Lane, Payload, Step, as_bytes
from plugin.weights.manifest import Manifest
from plugin.weights.tensor_layout import NamedTensors, TensorSpec
from plugin.weights.waiting import Handover


class Announcements:
    """What senders announce of a version: bucket after bucket, and its end.

    store: that senders and readers reach
    """

    def __init__(self, store: KeyStore, name: str) -> None:
        self._store, self._name = store, name

    def put(
        self,
        version: int,
        sender: int,
        number: int,
        bucket: Sequence[TensorSpec] | None,
        handle: Sequence[Any] = (),
    ) -> None:
        """Announce what message `number` of a sender is.

        bucket: None = the sender has sent everything
        handle: IPC: of the memory that holds the bucket
        """
        message: Any = None
        if bucket is not None:
            message = [[spec.to_json() for spec in bucket], list(handle)]
        self._store.set(self._key(version, sender, number), json.dumps(message))

    def read(self, version: int, sender: int) -> Iterator[tuple[list[TensorSpec], list[Any]]]:
        """What a sender announces, with its handles, up to its end."""
        number = 0
        while True:
            message = json.loads(self._store.get(self._key(version, sender, number)))
            if message is None:
                return
            rows, handle = message
            yield list(map(TensorSpec.from_json, rows)), handle
            number += 1

    def ack(self, version: int, sender: int, number: int, readers: int) -> None:
        """Acknowledge a bucket: this one of its readers no longer uses its memory."""
        self._store.arrive(f"{self._key(version, sender, number)}/acks", 1, readers)

    def wait_for_acks(self, version: int, sender: int, number: int) -> None:
        """Wait until all readers have acknowledged a bucket, and forget it."""
        key = self._key(version, sender, number)
        self._store.get(f"{key}/acks")
        self._store.delete(f"{key}/acks")
        self._store.delete(key)

    def _key(self, version: int, sender: int, number: int) -> str:
        return f"{self._name}/{version}/{sender}/{number}"


class AnnouncingSender(Sender):
    """Sends a version bucket by bucket."""

    bucket_bytes = BUCKET_BYTES

    def send(
        self,
        version: int,
        part: Iterable[tuple[str, Tensor] | None],
        manifest: Manifest | None = None,
        *,
        bucket_bytes: int | None = None,
    ) -> tuple[int, int]:
        """Send this rank's part of `version`; see `Sender`."""
        self._store.wait_for_engines(version)
        total, messages = 0, 0
        try:
            for bucket in cut_buckets(filter(None, part), bucket_bytes or self.bucket_bytes):
                self._deliver(version, messages, bucket)
                total += sum(tensor.nbytes for _, tensor in bucket)
                messages += 1
            self._finish_version(version)
        finally:
            self._end_version()
        return total, self._announce_end(version, messages)

    @abstractmethod
    def _deliver(self, version: int, number: int, bucket: NamedTensors) -> None:
        """Announce a bucket as message `number` and get it to the receivers."""

    def _finish_version(self, version: int) -> None:
        """Wait until the receivers have all buckets."""

    def _end_version(self) -> None:
        """Free what sending a version needed, complete or not."""

    @abstractmethod
    def _announce_end(self, version: int, number: int) -> int:
        """Announce the end as message `number`; messages left in the driver's store."""


class ServerSender(AnnouncingSender):
    """The side of trainer rank number `number` of those that send to servers.

    A bucket is the bytes of its tensors, one after the other, and one broadcast. The next one is
    packed meanwhile.
    """

    def __init__(self, group: WeightGroup, number: int) -> None:
        super().__init__(group, number)
        self._lane = Lane(self._store, number, rank=0)
        self._announcements = Announcements(self._store, group.name)
        self._buffers = Buffers(self._lane, self._store)
        self._packed: Handover[Payload | None] = Handover(self._store.waits)
        self._ended: Event | None = None

    def _deliver(self, version: int, number: int, bucket: NamedTensors) -> None:
        if self._ended is None:
            self._packed = Handover(self._store.waits)
            self._ended = self._lane.run(self._steps(self._packed))
        # Tensors are read where they are, so that those of larger elements come first.
        bucket = sorted(bucket, key=lambda entry: -entry[1].itemsize)
        specs = [TensorSpec.of(name, tensor) for name, tensor in bucket]
        payload = self._joined(bucket)
        self._store.waits.require_running()
        self._announcements.put(version, self._number, number, specs)
        self._packed.put(payload)

    def _joined(self, bucket: NamedTensors) -> Payload:
        """The bytes of a bucket; of a single tensor where they are, with a turn for a copy."""
        if len(bucket) == 1 and bucket[0][1].nbytes:
            turn = self._buffers.take(0)
            return Payload.of(as_bytes(bucket[0][1]), turn.buffer)
        sizes = [tensor.nbytes for _, tensor in bucket]
        free = self._buffers.take(sum(sizes))
        for (_, tensor), place in zip(bucket, free.tensor.split(sizes), strict=True):
            place.copy_(as_bytes(tensor))
        return Payload.of(free.tensor, free.buffer)

    def _steps(self, packed: Handover[Payload | None]) -> Iterator[Step]:
        while (payload := packed.get()) is not None:
            yield Step(0, lambda payload=payload: payload, self._buffers.give_back)  # type: ignore[misc]

    def _finish_version(self, version: int) -> None:
        if self._ended is None:
            return
        self._packed.put(None)
        self._store.waits.until(self._ended.is_set)
        self._buffers.release()
        self._ended = None

    def _announce_end(self, version: int, number: int) -> int:
        self._announcements.put(version, self._number, number, None)
        return number + 1

    def close(self, *, abort: bool = False) -> None:
        """Leave the process group."""
        super().close(abort=abort)
        self._lane.close(abort=abort)
