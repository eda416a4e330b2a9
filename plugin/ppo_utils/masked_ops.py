"""Sums, means and extremes that never compute with what is masked.

A masked position may hold NaN, inf or garbage. Multiplying it by 0 would let NaN through (0 * inf),
so every operation here selects first; `torch.where` also gives the masked position a gradient of
exactly 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def zero_masked(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """`values` [T] in float32, with `fill` wherever `mask` [T] is False."""
    values = values.float()
    return torch.where(mask, values, values.new_full((), fill))


#: The public name of `zero_masked` before it had this one.
neutralised = zero_masked


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of the unmasked values; 0 when there are none."""
    return zero_masked(values, mask).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the unmasked values; 0 (with a zero gradient) when there are none."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Largest unmasked value; -inf when there are none."""
    if values.numel() == 0:
        return values.new_full((), -torch.inf, dtype=torch.float32)
    return zero_masked(values, mask, -torch.inf).max()


def masked_min(values: Tensor, mask: Tensor) -> Tensor:
    """Smallest unmasked value; +inf when there are none."""
    return -masked_max(-values.float(), mask)
