"""How much memory is behind tensors."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def bytes_held(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory behind the tensors, each storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.resizable()}.values())
