"""Senders that announce every bucket in the driver's store, because nobody reads a lane for it.

Servers take one broadcast per tensor and are told of it by HTTP; workers beside a rank read its
memory (`ipc`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from functools import partial

from torch import Tensor

from plugin.weights.buckets import BUCKET_BYTES, cut_buckets
from plugin.weights.group import Sender, WeightGroup
from plugin.weights.lane import Lane, Payload, Step
from plugin.weights.manifest import Manifest
from plugin.weights.tensor_layout import NamedTensors, TensorSpec


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
                specs = [TensorSpec.of(name, tensor) for name, tensor in bucket]
                self._deliver(version, messages, bucket, specs)
                total += sum(spec.nbytes for spec in specs)
                messages += 1
            self._finish_version(version)
        finally:
            self._end_version()
        self._store.announce(version, self._number, messages, None)
        return total, messages + 1

    @abstractmethod
    def _deliver(
        self, version: int, number: int, bucket: NamedTensors, specs: list[TensorSpec]
    ) -> None:
        """Announce a bucket as message `number` and get it to the receivers."""

    def _finish_version(self, version: int) -> None:
        """Wait until the receivers have all buckets."""

    def _end_version(self) -> None:
        """Free what sending a version needed, complete or not."""


class ServerSender(AnnouncingSender):
    """The side of trainer rank number `number` of those that send to servers."""

    def __init__(self, group: WeightGroup, number: int) -> None:
        super().__init__(group, number)
        self._lane = Lane(self._store, number, rank=0)

    def _deliver(
        self, version: int, number: int, bucket: NamedTensors, specs: list[TensorSpec]
    ) -> None:
        self._store.announce(version, self._number, number, specs)
        self._lane.run_to_end(
            Step(0, partial(Payload.of, tensor), lambda _: None) for _, tensor in bucket
        )

    def close(self, *, abort: bool = False) -> None:
        """Leave the process group."""
        super().close(abort=abort)
        self._lane.close(abort=abort)
