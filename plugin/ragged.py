"""Tensors of different lengths, end to end in one: the form in which a batch is kept and moved.

Lengths and places are NumPy arrays: they live on the host by type, so that computing with them can
never wait for a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]


def as_integers(values: Sequence[int] | Integers | Tensor) -> Integers:
    """[N] int64 on the host."""
    if isinstance(values, Tensor):
        values = values.numpy(force=True)
    return np.asarray(values, np.int64)


def ragged_range(starts: Integers, lengths: Integers) -> Integers:
    """[sum of lengths]: starts[i], starts[i] + 1, ... for every i in turn.

    Example: starts [5, 0], lengths [3, 2]: [5, 6, 7, 0, 1].
    """
    before = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(starts - before, lengths)


class Ragged(Sequence[Tensor]):
    """A sequence of tensors that differ in their first dimension; each one is a view of `values`.

    values: [sum of lengths, ...]; lengths: [N]
    """

    def __init__(self, values: Tensor, lengths: Sequence[int] | Integers | Tensor) -> None:
        self.values, self.lengths = values, as_integers(lengths)

    @classmethod
    def of(cls, tensors: Sequence[Any]) -> Ragged:
        """Join tensors (or what becomes one); a `Ragged` stays as it is."""
        if isinstance(tensors, Ragged):
            return tensors
        parts = [torch.as_tensor(part) for part in tensors]
        values = torch.cat(parts) if parts else torch.zeros(0)
        return cls(values, [len(part) for part in parts])

    @cached_property
    def starts(self) -> Integers:
        """[N]: where each tensor begins."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def sample_index(self) -> Integers:
        """[sum of lengths]: index of the tensor that each value belongs to."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Ragged: ...
    def __getitem__(self, index: int | slice) -> Tensor | Ragged:
        if isinstance(index, slice):
            return self.select(np.arange(len(self))[index])
        start = int(self.starts[index])
        return self.values[start : start + int(self.lengths[index])]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.values.split(self.lengths.tolist()))

    def __repr__(self) -> str:
        return f"Ragged({list(self)})"

    def select(self, indices: Integers, places: Tensor | None = None) -> Ragged:
        """The tensors at `indices` [n], in that order; neighbors are a view, others are copied.

        places: `places_of(indices)`, where the caller has them already
        """
        lengths = self.lengths[indices]
        if len(indices) and bool((np.diff(indices) == 1).all()):
            first = int(self.starts[indices[0]])
            return Ragged(self.values[first : first + int(lengths.sum())], lengths)
        places = self.places_of(indices) if places is None else places
        return Ragged(self.values.index_select(0, places.to(self.values.device)), lengths)

    def places_of(self, indices: Integers) -> Tensor:
        """int64: where the values of the tensors at `indices` are in `values`."""
        return torch.from_numpy(ragged_range(self.starts[indices], self.lengths[indices]))

    def place_of(self, index: int) -> tuple[int, int]:
        """Index of the tensor that `values[index]` belongs to, and its position in it."""
        number = int(np.searchsorted(self.starts + self.lengths, index, side="right"))
        return number, index - int(self.starts[number])

    def spread(self, places: Tensor, count: int) -> Ragged:
        """[count]: these tensors at `places` [N], ascending and on the host; empty elsewhere."""
        lengths = np.zeros(count, np.int64)
        lengths[places.numpy()] = self.lengths
        return Ragged(self.values, lengths)

    def sums(self) -> Integers:
        """[N]: the sum of each tensor's integers."""
        total = np.append(0, np.cumsum(as_integers(self.values)))
        return total[self.starts + self.lengths] - total[self.starts]

    def reduced(self, function: np.ufunc, empty: int) -> Integers:
        """[N] int64: `function` over each tensor's integers or booleans; `empty` where it has none.

        In one pass, without an index of every value.
        """
        found = np.full(len(self), empty, np.int64)
        some = np.flatnonzero(self.lengths)
        if len(some):
            values = self.values.numpy(force=True)
            found[some] = function.reduceat(values, self.starts[some], dtype=np.int64)
        return found

    def like(self, values: Tensor) -> Ragged:
        """Other values of the same lengths."""
        return Ragged(values, self.lengths)

    @staticmethod
    def concatenated(parts: Sequence[Ragged]) -> Ragged:
        """One after the other."""
        return Ragged(
            torch.cat([part.values for part in parts]),
            np.concatenate([part.lengths for part in parts]),
        )


class Stored(Sequence[Any]):
    """Where the values of each sample of a column are, when they are not in this process.

    objects: references; what each holds is up to who stored it
    owner, place: [N] index of each sample's object, and its number among the samples in it
    """

    def __init__(self, objects: Sequence[Any], owner: Integers, place: Integers) -> None:
        self.objects, self.owner, self.place = list(objects), owner, place

    def __len__(self) -> int:
        return len(self.owner)

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(
            f"the values of sample {index} are not in this process; fetch the samples that are "
            "needed with plugin.cluster.array_transport.fetched"
        )

    def select(self, indices: Integers) -> Stored:
        """Those of the samples at `indices` [n]; objects that none of them is in are left out.

        For no samples one object stays: it tells shape and type.
        """
        if not len(indices):
            return Stored(self.objects[:1], indices, indices)
        used, owner = np.unique(self.owner[indices], return_inverse=True)
        return Stored([self.objects[i] for i in used.tolist()], owner, self.place[indices])

    @staticmethod
    def concatenated(parts: Sequence[Stored]) -> Stored:
        """One after the other."""
        firsts = np.cumsum([0, *(len(part.objects) for part in parts)])
        return Stored(
            [reference for part in parts for reference in part.objects],
            np.concatenate([a + part.owner for a, part in zip(firsts, parts, strict=False)]),
            np.concatenate([part.place for part in parts]),
        )


#: A per-token column of a batch: here, or elsewhere.
TokenColumn = Ragged | Stored


def concatenated(parts: Sequence[TokenColumn]) -> TokenColumn:
    """One after the other; all are here or all are elsewhere."""
    first = parts[0]
    if isinstance(first, Stored):
        return Stored.concatenated([part for part in parts if isinstance(part, Stored)])
    return Ragged.concatenated([part for part in parts if isinstance(part, Ragged)])
