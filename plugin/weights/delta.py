"""A version as what has changed since the one before: the new values, and where they go.

Between two steps most elements keep their value in the engine's dtype. The sender keeps a copy of
what it sent last, compares, and sends chunks of bytes through any transport in place of the
tensors. The receiver writes the new values over the old ones and compares a checksum of every whole
tensor with the sender's, so that a delta either leads to the sender's bits or is known not to.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plugin.errors import DeltaError, WeightError
from plugin.weights.buckets import NO_WEIGHTS
from plugin.weights.checksums import bit_checksum
from plugin.weights.tensor_layout import NamedTensors, TensorSpec

#: What chunks are called among the tensors of a version; no tensor of a model has such a name.
_CHUNK_NAME = "changes since version {}, chunk {}"
_IS_CHUNK = re.compile(r"changes since version \d+, chunk \d+$")
#: Changed elements of more tensors are joined up to so many bytes.
CHUNK_BYTES = 16 << 20
#: In front of a chunk: checksum of all that follows, and size of its index; int64 both.
_HEADER_BYTES = 16
_ALIGNMENT = 8

#: How the positions of a tensor's changed elements are written: there are none; 2 bytes each,
#: within blocks that are counted; a bit for every element; or not, because all elements are sent.
_NONE, _OFFSETS, _BITMAP, _WHOLE = range(4)
_BLOCK = 1 << 16

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Engines may compute routers in float32 whatever the dtype of the model is.
_ROUTER = re.compile(r"(gate|router)\.(weight|bias)$")


def in_engine_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor as it is sent to an engine of this dtype.

    Vectors and routers keep the trainer's: some engines have them in float32, and they are small.
    """
    keeps = tensor.dim() < 2 or _ROUTER.search(name) is not None
    return tensor if keeps else tensor.to(_narrower(tensor, dtype))


def _narrower(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """What of a tensor's values a trainer and an engine of this dtype agree on."""
    is_wider = dtype.itemsize > tensor.dtype.itemsize or not tensor.is_floating_point()
    return tensor.dtype if is_wider else dtype


class _Row(NamedTuple):
    """What the index of a chunk says of a tensor.

    dtype: of the values
    changed: how many elements
    checksum: of all of the tensor in `checked_dtype`, once the changes are applied
    """

    name: str
    dtype: str
    shape: list[int]
    kind: int
    changed: int
    checked_dtype: str
    checksum: int

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec.from_json([self.name, self.dtype, self.shape])


@dataclass
class Changes:
    """How many of how many elements changed."""

    changed: int = 0
    elements: int = 0

    @classmethod
    def sum_of(cls, parts: Sequence[Changes]) -> Changes:
        """Those of several senders together."""
        return cls(sum(part.changed for part in parts), sum(part.elements for part in parts))

    @property
    def share(self) -> float:
        """Of the elements, those that changed."""
        return self.changed / max(1, self.elements)


class SentCopy:
    """What a sender sent last, in host memory and in the engine's dtype.

    version: that it is a copy of; NO_WEIGHTS while it is written
    changes: of the last delta
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._held: dict[str, Tensor] = {}
        self.version = NO_WEIGHTS
        self.changes = Changes()

    def remembered(
        self, version: int, part: Iterable[tuple[str, Tensor] | None]
    ) -> Iterator[tuple[str, Tensor] | None]:
        """Pass on the tensors of a full version."""
        self.version = NO_WEIGHTS
        for item in part:
            if item is not None:
                name, tensor = item
                narrow = in_engine_dtype(name, tensor.detach(), self._dtype)
                if name not in self._held:
                    self._held[name] = torch.empty(narrow.shape, dtype=narrow.dtype)
                self._held[name].copy_(narrow)
            yield item
        self.version = version

    def delta(
        self, version: int, since: int, part: Iterable[tuple[str, Tensor] | None]
    ) -> list[tuple[str, Tensor]]:
        """The chunks that lead from version `since`, in host memory."""
        if self.version != since:
            raise WeightError(
                f"a delta since weight version {since} was asked for, and the sender's copy is of "
                f"{self.version}; a full version has to come first"
            )
        self.version, self.changes = NO_WEIGHTS, Changes()
        chunks: list[Tensor] = []
        rows: list[_Row] = []
        pieces: list[Tensor] = []
        size = 0
        for name, tensor in filter(None, part):
            row, own = self._changed(name, in_engine_dtype(name, tensor.detach(), self._dtype))
            rows.append(row)
            pieces += own
            size += sum(piece.nbytes for piece in own)
            if size >= CHUNK_BYTES:
                chunks.append(_joined(rows, pieces))
                rows, pieces, size = [], [], 0
        if rows:
            chunks.append(_joined(rows, pieces))
        self.version = version
        return [(_CHUNK_NAME.format(since, number), chunk) for number, chunk in enumerate(chunks)]

    def _changed(self, name: str, tensor: Tensor) -> tuple[_Row, list[Tensor]]:
        """A tensor's row and its pieces in host memory; the copy follows."""
        held = self._held[name]
        new, old = tensor.reshape(-1), held.to(tensor.device).view(-1)
        index = (_bits(new) != _bits(old)).nonzero().view(-1)
        kind, values = _kind(index.numel(), new), new[index]
        pieces = _positions(kind, index, new.numel())
        if kind != _NONE:
            pieces.append(new if kind == _WHOLE else values)
        if kind == _WHOLE:
            held.copy_(tensor)
        else:
            held.view(-1)[index.to("cpu")] = values.to("cpu")
        self.changes.changed += index.numel()
        self.changes.elements += new.numel()
        checked = _narrower(tensor, self._dtype)
        _, dtype, shape = TensorSpec.of(name, tensor).to_json()
        checked_name = str(checked).split(".")[-1]
        checksum = bit_checksum(tensor.to(checked))
        row = _Row(name, dtype, list(shape), kind, index.numel(), checked_name, checksum)
        return row, [piece.to("cpu", copy=kind == _WHOLE) for piece in pieces]


def on_device(chunks: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Chunks where they can be sent from, one at a time."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, chunk in chunks:
        yield name, chunk.to(device)


class DeltaReader:
    """Applies the chunks of a delta, and says which tensors are not the sender's then.

    place: the memory that the engine has a tensor in, in any dtype that holds the sender's values;
        None = it has none of its own
    since: the version that it has
    """

    def __init__(self, place: Callable[[TensorSpec], Tensor | None], since: int) -> None:
        self._place, self._since = place, since
        self._wrong: list[str] = []
        self.specs: list[TensorSpec] = []

    @torch.no_grad()
    def take(self, bucket: NamedTensors) -> None:
        """Apply some chunks."""
        for name, chunk in bucket:
            if name.startswith(_CHUNK_NAME.format(self._since, "")):
                self._apply(name, chunk)
            else:
                self._wrong.append(f"{name}, where the engine has version {self._since}")

    def require_exact(self, engine: str = "the engine") -> None:
        """A `DeltaError` unless every tensor is the sender's, to the bit."""
        if self._wrong:
            raise DeltaError(
                f"{engine}: {len(self._wrong)} parts of a delta did not lead to the trainer's "
                f"weights, the first of them {self._wrong[0]}"
            )

    def _apply(self, name: str, chunk: Tensor) -> None:
        checksum, size = chunk[:_HEADER_BYTES].view(torch.int64).tolist()
        if bit_checksum(chunk[8:]) != checksum:
            self._wrong.append(f"{name}, which was damaged on its way")
            return
        body = chunk[_HEADER_BYTES:]
        rows = json.loads(zlib.decompress(body[:size].cpu().numpy().tobytes()))
        start = _aligned(size)
        for entry in rows:
            row = _Row(*entry)
            spec = row.spec
            self.specs.append(spec)
            pieces = []
            for dtype, count in _sizes(row.kind, row.changed, spec):
                end = start + count * dtype.itemsize
                pieces.append(body[start:end].view(dtype))
                start = _aligned(end)
            target = self._place(spec)
            if target is not None:
                _write(target.view(-1), row.kind, pieces)
                checked = target.to(getattr(torch, row.checked_dtype))
                if bit_checksum(checked) != row.checksum:
                    self._wrong.append(row.name)


class DeltaBase:
    """A receiver's copy of a version in host memory, for a model that holds it in another form.

    version: that it is a copy of; NO_WEIGHTS while it is written
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._held: dict[str, Tensor] = {}
        self._delta = DeltaReader(self._place_of, NO_WEIGHTS)
        self.version = NO_WEIGHTS

    def beginning(self, take: Callable[[NamedTensors], None]) -> Callable[[NamedTensors], None]:
        """What takes the buckets of a version: those of a full one are for `take` as well."""
        self._delta = DeltaReader(self._place_of, self.version)
        self.version = NO_WEIGHTS

        def taking(bucket: NamedTensors) -> None:
            for name, tensor in bucket:
                self._held[name] = in_engine_dtype(name, tensor, self._dtype).to("cpu", copy=True)
            take(bucket)

        return by_kind(taking, self._delta)

    def completed(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """End a version: all tensors after a delta, none after a full one; or a `DeltaError`."""
        self._delta.require_exact()
        self.version = version
        for spec in self._delta.specs:
            yield spec.name, self._held[spec.name]

    def _place_of(self, spec: TensorSpec) -> Tensor | None:
        return self._held[spec.name]


def by_kind(
    take: Callable[[NamedTensors], None], delta: DeltaReader
) -> Callable[[NamedTensors], None]:
    """Hand the tensors of a full version to `take`, and the chunks of a delta to its reader."""

    def taking(bucket: NamedTensors) -> None:
        is_delta = _IS_CHUNK.match(bucket[0][0]) is not None
        (delta.take if is_delta else take)(bucket)

    return taking


def _bits(values: Tensor) -> Tensor:
    return values.view(_INTEGERS[values.dtype.itemsize])


def _kind(count: int, new: Tensor) -> int:
    """What takes the fewest bytes."""
    total, size = new.numel(), new.element_size()
    if not count:
        return _NONE
    positions = {_OFFSETS: 4 * -(-total // _BLOCK) + 2 * count, _BITMAP: -(-total // 8)}
    costs = {kind: cost + size * count for kind, cost in positions.items()} | {_WHOLE: size * total}
    return min(costs, key=lambda kind: costs[kind])


def _positions(kind: int, index: Tensor, total: int) -> list[Tensor]:
    """The pieces that say where the elements `index` [count], ascending, of `total` are."""
    if kind == _OFFSETS:
        starts = torch.arange(0, total + _BLOCK, _BLOCK, device=index.device)
        ends = torch.searchsorted(index, starts)
        return [ends.diff().to(torch.int32), (index % _BLOCK).to(torch.int16)]
    if kind == _BITMAP:
        bits = torch.zeros(-(-total // 8) * 8, dtype=torch.uint8, device=index.device)
        bits[index] = 1
        weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)
        return [(bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8)]
    return []


def _sizes(kind: int, count: int, spec: TensorSpec) -> list[tuple[torch.dtype, int]]:
    """Type and length of the pieces of a tensor."""
    total = torch.Size(spec.shape).numel()
    if kind == _OFFSETS:
        blocks = -(-total // _BLOCK)
        return [(torch.int32, blocks), (torch.int16, count), (spec.dtype, count)]
    if kind == _BITMAP:
        return [(torch.uint8, -(-total // 8)), (spec.dtype, count)]
    return [(spec.dtype, total)] if kind == _WHOLE else []


def _write(target: Tensor, kind: int, pieces: list[Tensor]) -> None:
    """Write the changed elements over the old ones in `target` [elements]."""
    if kind == _NONE:
        return
    pieces = [piece.to(target.device) for piece in pieces]
    values = pieces.pop().to(target.dtype)
    if kind == _WHOLE:
        target.copy_(values)
        return
    if kind == _OFFSETS:
        counts, offsets = (piece.to(torch.int64) for piece in pieces)
        blocks = torch.arange(len(counts), device=target.device).repeat_interleave(counts)
        index = blocks * _BLOCK + offsets % _BLOCK
    else:
        shifts = torch.arange(8, dtype=torch.uint8, device=target.device)
        index = (pieces[0].unsqueeze(1) >> shifts & 1).view(-1).nonzero().view(-1)
    target[index] = values


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _joined(rows: list[_Row], pieces: Iterable[Tensor]) -> Tensor:
    """A chunk: checksum of the rest, size of the index, index and pieces; [bytes] uint8."""
    index = zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 1)
    parts: list[Any] = [torch.frombuffer(bytearray(index), dtype=torch.uint8)]
    parts += [piece.contiguous().view(torch.uint8) for piece in pieces]
    starts = [_HEADER_BYTES]
    for part in parts:
        starts.append(starts[-1] + _aligned(part.numel()))
    chunk = torch.zeros(starts[-1], dtype=torch.uint8)
    for part, (start, _) in zip(parts, pairwise(starts), strict=True):
        chunk[start : start + part.numel()] = part
    header = chunk[: starts[0]].view(torch.int64)
    header[1] = len(index)
    header[0] = bit_checksum(chunk[8:])
    return chunk
