"""Implementations of the two passes over `[T, V/tp]` logits, and the choice between them."""

from __future__ import annotations

import torch

from plugin.megatron_backend.kernels import blocked_torch
from plugin.megatron_backend.kernels.row_statistics import (
    RowKernels,
    RowNormalizer,
    ShardStatistics,
)

__all__ = ["RowKernels", "RowNormalizer", "ShardStatistics", "row_kernels_for"]


def row_kernels_for(logits: torch.Tensor) -> RowKernels:
    """The fastest implementation that runs for these logits on this machine."""
    return blocked_torch
