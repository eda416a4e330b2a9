"""What a sender sends of every version: tensors, cut into buckets, in rounds.

It depends on the model and its layout only, so it is made once, from tensors without memory, and
receivers keep it between versions.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from torch import Tensor

from plugin.errors import TransferError
from plugin.weights.tensor_layout import TensorSpec, padded_sizes

Bucket = tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Manifest:
    """One sender's buckets by round.

    A bucket is at most as large as `of` was told, or one tensor, which then needs no copy. Buckets
    are in the order of their last tensors: a large tensor may overtake small ones before it.
    """

    rounds: tuple[tuple[Bucket, ...], ...]

    @classmethod
    def of(
        cls,
        part: Iterable[tuple[str, Tensor] | None],
        bucket_bytes: int,
        alone_bytes: int | None = None,
    ) -> Manifest:
        """The manifest of named tensors, of which only the shapes are read; None ends a round.

        alone_bytes: a tensor of at least this size is a bucket; None = that of a bucket
        """
        alone_bytes = bucket_bytes if alone_bytes is None else alone_bytes
        rounds: list[list[TensorSpec]] = [[]]
        for item in part:
            if item is None:
                rounds.append([])
            else:
                rounds[-1].append(TensorSpec.of(*item))
        if len(rounds) > 1 and not rounds[-1]:
            rounds.pop()
        return cls(tuple(tuple(_buckets(specs, bucket_bytes, alone_bytes)) for specs in rounds))

    @property
    def buckets(self) -> list[Bucket]:
        """Those of all rounds."""
        return [bucket for buckets in self.rounds for bucket in buckets]

    @property
    def nbytes(self) -> int:
        """Size of all tensors."""
        return sum(spec.nbytes for bucket in self.buckets for spec in bucket)

    def encoded(self) -> bytes:
        """As bytes, for `decoded`."""
        rows = [
            [[spec.to_json() for spec in bucket] for bucket in buckets] for buckets in self.rounds
        ]
        return zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 1)

    @classmethod
    def decoded(cls, raw: bytes) -> Manifest:
        """What `encoded` made bytes of."""
        rows = json.loads(zlib.decompress(raw))
        return cls(
            tuple(
                tuple(tuple(map(TensorSpec.from_json, bucket)) for bucket in buckets)
                for buckets in rows
            )
        )


def _buckets(specs: Iterable[TensorSpec], bucket_bytes: int, alone_bytes: int) -> list[Bucket]:
    """Buckets in the order of their last tensors."""
    ended: list[tuple[int, Bucket]] = []
    held: list[TensorSpec] = []
    size = last = 0
    for number, spec in enumerate(specs):
        [padded] = padded_sizes([spec])
        if padded >= alone_bytes:
            ended.append((number, (spec,)))
            continue
        if held and size + padded > bucket_bytes:
            ended.append((last, tuple(held)))
            held, size = [], 0
        held.append(spec)
        size, last = size + padded, number
    if held:
        ended.append((last, tuple(held)))
    return [bucket for _, bucket in sorted(ended, key=lambda entry: entry[0])]


def in_turns(manifests: Sequence[Manifest], per_stage: int) -> list[tuple[int, Bucket]]:
    """Sender and bucket of everything that is sent, in the order in which receivers take it.

    All stages send at the same time. Within a stage its senders do, a round at a time: what a layer
    consists of comes from all of them before the next layers, and engines may keep the tensors of a
    layer until they have all.

    per_stage: senders of a pipeline stage
    """
    stages = []
    for first in range(0, len(manifests), per_stage):
        senders = range(first, first + per_stage)
        of_stage: list[tuple[int, Bucket]] = []
        for buckets in zip_longest(*(manifests[sender].rounds for sender in senders), fillvalue=()):
            for turn in zip_longest(*buckets):
                of_stage += [
                    (sender, bucket)
                    for sender, bucket in zip(senders, turn, strict=True)
                    if bucket is not None
                ]
        stages.append(of_stage)
    return [entry for turn in zip_longest(*stages) for entry in turn if entry is not None]


class Packing:
    """Finds the place of every tensor of a part in the buckets of its manifest."""

    def __init__(self, manifest: Manifest) -> None:
        self._places = {
            spec.name: (number, place, bucket)
            for number, bucket in enumerate(manifest.buckets)
            for place, spec in enumerate(bucket)
        }
        self._left = [len(bucket) for bucket in manifest.buckets]

    def place_of(self, name: str, tensor: Tensor) -> tuple[Bucket, int, bool]:
        """A tensor's bucket, its place in it, and whether this completes the bucket."""
        number, place, bucket = self._places.get(name, (0, 0, ()))
        if not bucket or bucket[place] != TensorSpec.of(name, tensor):
            known = bucket[place] if bucket else "nothing"
            raise TransferError(
                f"{TensorSpec.of(name, tensor)} is to be sent where the receivers expect {known}"
            )
        self._left[number] -= 1
        return bucket, place, self._left[number] == 0

    def require_complete(self) -> None:
        """A `TransferError` unless every tensor has come once."""
        if any(self._left):
            raise TransferError(f"{sum(self._left)} tensors of the manifest were not sent")
