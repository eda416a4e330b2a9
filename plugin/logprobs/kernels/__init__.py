"""Implementations of the two passes over `[T, V/tp]` logits, and the choice between them."""

from __future__ import annotations

import functools
import warnings

import torch

from plugin.logprobs.kernels import blocked_torch, cpu_extension
from plugin.logprobs.kernels.row_statistics import (
    RowKernels,
    RowNormalizer,
    ShardStatistics,
)

__all__ = ["RowKernels", "RowNormalizer", "ShardStatistics", "row_kernels_for"]


def row_kernels_for(logits: torch.Tensor) -> RowKernels:
    """The fastest implementation that runs for these logits on this machine."""
    if logits.device.type == "cuda":
        return _triton_rows() or blocked_torch
    if logits.device.type == "cpu" and cpu_extension.runs(logits.dtype):
        return cpu_extension
    return blocked_torch


@functools.cache
def _triton_rows() -> RowKernels | None:
    try:
        from plugin.logprobs.kernels import triton_rows
    except ImportError as error:
        warnings.warn(
            "log-probs run on plain torch operations, several times slower: Triton cannot be "
            f"imported ({error}). Install the version that belongs to this PyTorch.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return triton_rows
