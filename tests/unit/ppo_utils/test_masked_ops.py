"""Masked sums, means and extremes: values, empty cases, and what masked garbage must not do."""

import math

import pytest
import torch

from plugin.ppo_utils import masked_max, masked_mean, masked_min, masked_sum, zero_masked

GARBAGE = [math.nan, math.inf, -math.inf, 1e30, -1e30]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_masked_operations_never_read_a_masked_value(garbage: float) -> None:
    values = torch.tensor([1.0, garbage, 4.0, -2.0])
    mask = torch.tensor([True, False, True, True])
    assert masked_sum(values, mask).item() == 3.0  # 1 + 4 - 2
    assert masked_mean(values, mask).item() == 1.0  # 3 / 3
    assert masked_max(values, mask).item() == 4.0
    assert masked_min(values, mask).item() == -2.0
    assert zero_masked(values, mask, 7.0).tolist() == [1.0, 7.0, 4.0, -2.0]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_the_gradient_of_a_masked_value_is_exactly_zero(garbage: float) -> None:
    values = torch.tensor([2.0, garbage, 4.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    masked_mean(values, mask).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("length", [0, 3])
def test_nothing_unmasked_gives_a_finite_zero_with_a_graph(length: int) -> None:
    values = torch.full((length,), math.nan, requires_grad=True)
    mask = torch.zeros(length, dtype=torch.bool)
    mean = masked_mean(values, mask)
    mean.backward()
    assert mean.item() == 0.0
    assert masked_sum(values, mask).item() == 0.0
    assert values.grad is not None and values.grad.tolist() == [0.0] * length
    assert masked_max(values, mask).item() == -math.inf
    assert masked_min(values, mask).item() == math.inf


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    # 4096 ones: float16 counts exactly only up to 2048, bfloat16 up to 256.
    values = torch.ones(4096, dtype=dtype)
    total = masked_sum(values, torch.ones(4096, dtype=torch.bool))
    assert total.dtype == torch.float32 and total.item() == 4096.0
