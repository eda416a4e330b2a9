"""Weights over process groups: from the trainer's ranks to the workers of all engines.

A sender sends what it holds itself: the first rank of a pipeline stage what the stage's ranks
share, every expert parallel rank its own experts. A version is a header per sender and then
buckets, as the manifests say, which follow the header of the first version. Nothing of that passes
through the driver's store: engines say there that they are ready, and the rest is in the lanes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from threading import Event

import torch
from torch import Tensor

from plugin.errors import TransferError
from plugin.weights.group import Receiver, Sender, WeightGroup
from plugin.weights.lane import Buffers, Lane, Payload, Step, as_bytes
from plugin.weights.manifest import Bucket, Manifest, Packing, in_turns
from plugin.weights.tensor_layout import NamedTensors, padded_sizes, tensors_in
from plugin.weights.waiting import Handover

#: Version, and bytes of the manifest; 0 of these: it is that of the version before.
_HEADER = struct.Struct("<qq")


def _size(bucket: Bucket) -> int:
    """Bytes of the operation that takes a bucket; a single tensor is sent from where it is."""
    return bucket[0].nbytes or 1 if len(bucket) == 1 else sum(padded_sizes(bucket)) or 1


def _tensors(memory: Tensor, bucket: Bucket) -> list[Tensor]:
    """The tensors of a bucket in the bytes of its operation."""
    if len(bucket) > 1:
        return tensors_in(memory, bucket)
    [spec] = bucket
    return [memory[: spec.nbytes].view(spec.dtype).view(spec.shape)]


def _used_here(memory: Tensor) -> None:
    """Have torch not reuse memory of a lane's stream before this thread's stream is done with it.

    A consumer may keep tensors and drop them when it has begun to copy them.
    """
    if memory.is_cuda:
        memory.record_stream(torch.cuda.current_stream())


class _Manifests:
    """Those of a lane's senders, as they were exchanged in the lane."""

    def __init__(self, lane: Lane, senders: int) -> None:
        self._lane = lane
        self.known = [Manifest(())] * senders

    def exchange(self, version: int, manifest: Manifest | None = None, own: int = -1) -> None:
        """Tell or learn which version begins, and the manifests that are new.

        own: number of this sender in the lane, with its manifest
        """
        raw = b""
        if manifest is not None and manifest != self.known[own]:
            raw = manifest.encoded()
        header = _HEADER.pack(version, len(raw))
        headers = self._exchanged([(number, header) for number in range(len(self.known))])
        for number, found in enumerate(headers):
            begun, size = _HEADER.unpack(found)
            if begun != version:
                raise TransferError(f"a sender begins version {begun} instead of {version}")
            if size:
                [body] = self._exchanged([(number, raw if number == own else bytes(size))])
                self.known[number] = Manifest.decoded(body)

    def _exchanged(self, messages: list[tuple[int, bytes]]) -> list[bytes]:
        """Messages of senders as these have them; others give as many bytes of anything."""
        tensors = [self._lane.on_device(message) for _, message in messages]
        self._lane.run_to_end(
            Step(number, partial(Payload.of, tensor), lambda _: None)
            for (number, _), tensor in zip(messages, tensors, strict=True)
        )
        return [tensor.cpu().numpy().tobytes() for tensor in tensors]


class BroadcastSender(Sender):
    """The side of trainer rank number `number` of those that send."""

    def __init__(self, group: WeightGroup, number: int) -> None:
        super().__init__(group, number)
        self._own = number % group.per_lane
        self._lane = Lane(self._store, number // group.per_lane, rank=self._own)
        self._manifests = _Manifests(self._lane, group.per_lane)
        self._buffers = Buffers(self._lane, self._store)
        self._others = Buffers(self._lane, self._store)

    def send(
        self,
        version: int,
        part: Iterable[tuple[str, Tensor] | None],
        manifest: Manifest | None = None,
    ) -> tuple[int, int]:
        """Send this rank's part of `version`; it must not change before this returns."""
        assert manifest is not None, "receivers have to know what comes"
        if self._own == 0:
            self._store.wait_for_engines(version)
        self._manifests.exchange(version, manifest, self._own)
        packed: Handover[Payload] = Handover(self._store.waits)
        ended = self._lane.run(self._steps(packed))
        self._pack(part, Packing(manifest), packed)
        self._store.waits.until(ended.is_set)
        self._buffers.release()
        self._others.release()
        return manifest.nbytes, 0

    def _steps(self, packed: Handover[Payload]) -> Iterator[Step]:
        """The lane's operations: what this sender has packed, and what others in the lane send."""
        for root, bucket in in_turns(self._manifests.known, self.group.per_lane):
            if root == self._own:
                yield Step(root, packed.get, self._buffers.give_back)
            else:
                room = partial(self._others.take, _size(bucket))
                yield Step(root, room, self._others.give_back)

    def _pack(
        self,
        part: Iterable[tuple[str, Tensor] | None],
        packing: Packing,
        packed: Handover[Payload],
    ) -> None:
        """Hand the buckets over; a single tensor as it is, with a turn in place of a copy."""
        joined: Payload | None = None
        places: list[Tensor] = []
        for name, tensor in filter(None, part):
            tensor = tensor.detach()
            bucket, place, completes = packing.place_of(name, tensor)
            if len(bucket) == 1 and tensor.nbytes:
                turn = self._buffers.take(0)
                packed.put(Payload.of(as_bytes(tensor), turn.buffer))
                continue
            if joined is None:
                joined = self._buffers.take(_size(bucket))
                places = _tensors(joined.tensor, bucket)
            places[place].copy_(tensor)
            if completes:
                packed.put(Payload.of(joined.tensor, joined.buffer))
                joined = None
        packing.require_complete()

    def close(self, *, abort: bool = False) -> None:
        """Leave the lane."""
        super().close(abort=abort)
        self._lane.close(abort=abort)


class BroadcastReceiver(Receiver):
    """The side of worker `number` of all engines' workers.

    keeps: whether the consumer keeps the tensors; otherwise their memory is reused
    """

    def __init__(self, group: WeightGroup, number: int, *, keeps: bool = False) -> None:
        super().__init__(group)
        self._number, count = number, group.per_lane
        self._lanes = [Lane(self._store, lane, rank=count + number) for lane in range(group.lanes)]
        self._manifests = [_Manifests(lane, count) for lane in self._lanes]
        self._buffers = [Buffers(lane, self._store, reuses=not keeps) for lane in self._lanes]

    def barrier(self, version: int) -> None:
        """Wait until the senders begin `version`."""
        self._store.engine_is_ready(version, self._number)
        for manifests in self._manifests:
            manifests.exchange(version)

    def receive(self, version: int, take: Callable[[NamedTensors], None]) -> None:
        """Hand every bucket of `version` to `take`, after `barrier`."""
        known = [manifest for manifests in self._manifests for manifest in manifests.known]
        turns = in_turns(known, self.group.per_stage)
        arrived: list[Handover[Payload]] = [Handover(self._store.waits) for _ in self._lanes]
        ended: list[Event] = []
        for number, lane in enumerate(self._lanes):
            ended.append(lane.run(self._steps(number, turns, arrived[number])))
        for sender, bucket in turns:
            lane_number = sender // self.group.per_lane
            payload = arrived[lane_number].get()
            _used_here(payload.tensor)
            tensors = _tensors(payload.tensor, bucket)
            take([(spec.name, tensor) for spec, tensor in zip(bucket, tensors, strict=True)])
            del tensors
            self._buffers[lane_number].give_back(payload)
        for event, buffers in zip(ended, self._buffers, strict=True):
            self._store.waits.until(event.is_set)
            buffers.release()

    def _steps(
        self, lane: int, turns: list[tuple[int, Bucket]], arrived: Handover[Payload]
    ) -> Iterator[Step]:
        """The operations of a lane, into its buffers."""
        for sender, bucket in turns:
            number, root = divmod(sender, self.group.per_lane)
            if number == lane:
                yield Step(root, partial(self._buffers[lane].take, _size(bucket)), arrived.put)

    def close(self, *, abort: bool = False) -> None:
        """Leave all lanes."""
        super().close(abort=abort)
        for lane in self._lanes:
            lane.close(abort=abort)
