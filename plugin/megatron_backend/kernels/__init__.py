"""Implementations of the two passes over `[T, V/tp]` logits, and the choice between them."""

from __future__ import annotations

import torch

from plugin.megatron_backend.kernels import blocked_torch, cpu_extension
from plugin.megatron_backend.kernels.row_statistics import (
    RowKernels,
    RowNormalizer,
    ShardStatistics,
)

__all__ = ["RowKernels", "RowNormalizer", "ShardStatistics", "row_kernels_for"]


def row_kernels_for(logits: torch.Tensor) -> RowKernels:
    """The fastest implementation that runs for these logits on this machine."""
    if logits.device.type == "cpu" and logits.dtype in cpu_extension.DTYPES:
        return cpu_extension if cpu_extension.load_library() is not None else blocked_torch
    return blocked_torch
