"""Tensors by name, type and shape, and where they are in memory that holds several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64

NamedTensors = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True)
class TensorSpec:
    """What a receiver must know of a tensor before it arrives."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorSpec:
        """The spec of a tensor."""
        return cls(name, tensor.dtype, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        """Size of the tensor."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def to_json(self) -> list[Any]:
        """As plain values, for `from_json`."""
        return [self.name, str(self.dtype).split(".")[-1], self.shape]

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> TensorSpec:
        """What `to_json` made plain values of."""
        name, kind, shape = row
        return cls(name, getattr(torch, kind), tuple(shape))


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
