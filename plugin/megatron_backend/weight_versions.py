"""Weights of the last versions in host memory, to compute log-probs with them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plugin.errors import TrainingError

#: Weights are exchanged piece by piece, through so many bytes on the device.
_PIECE = 1 << 26


class WeightVersions:
    """Copies of what training changes in a model, by weight version.

    Parameters that are not trained, such as the base of adapters, are not copied.

    limit: versions before the current one that are kept; older ones are forgotten
    """

    def __init__(self, chunks: Sequence[Any], limit: int) -> None:
        self._chunks, self._limit = chunks, limit
        self._copies: dict[int, list[Tensor]] = {}

    @property
    def versions(self) -> list[int]:
        """The versions that are kept, oldest first."""
        return sorted(self._copies)

    @property
    def nbytes(self) -> int:
        """Host memory of all copies."""
        return sum(part.nbytes for parts in self._copies.values() for part in parts)

    def keep(self, version: int) -> None:
        """Copy the current weights, of `version`, before they change; nothing if they are kept."""
        for old in [v for v in self._copies if v <= version - self._limit]:
            del self._copies[old]
        if self._limit and version not in self._copies:
            self._copies[version] = [_copied(tensor) for tensor in self._tensors()]

    def forget(self) -> None:
        """Drop all copies: other weights are loaded, which may have the same numbers."""
        self._copies.clear()

    @contextmanager
    def swapped_in(self, version: int) -> Iterator[None]:
        """The model has the weights of `version` inside the body; the current ones wait."""
        copies = self._copies.get(version)
        if copies is None:
            raise TrainingError(
                f"the weights of version {version} are not kept, only those of {self.versions}; "
                "keep them before the first update that changes them"
            )
        current = self._tensors()
        _exchange(current, copies)
        try:
            yield
        finally:
            _exchange(current, copies)

    def _tensors(self) -> list[Tensor]:
        return [
            tensor.detach()
            for chunk in self._chunks
            for tensor in (
                *(p for p in chunk.parameters() if p.requires_grad),
                *nn.Module.buffers(chunk),  # DDP has a list of this name
            )
        ]


def _copied(tensor: Tensor) -> Tensor:
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor)


def _exchange(current: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    for ours, theirs in zip(current, copies, strict=True):
        rows = _rows_of_piece(ours)
        pieces = (torch.atleast_1d(tensor).split(rows) for tensor in (ours, theirs))
        for here, there in zip(*pieces, strict=True):
            waiting = here.clone()
            here.copy_(there)
            there.copy_(waiting)


def _rows_of_piece(tensor: Tensor) -> int:
    rows = torch.atleast_1d(tensor).shape[0]
    return max(1, rows * _PIECE // max(1, tensor.nbytes))
