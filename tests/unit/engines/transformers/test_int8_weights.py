"""Weight-only int8."""

from __future__ import annotations

import torch
from torch import nn

from plugin.engines.transformers.linear_layers import (
    Int8Linear,
    quantize_linears,
    quantize_rows,
    through_int8,
)


def test_each_row_has_its_own_scale() -> None:
    # 1.27 / 127 = 0.01 and 12.7 / 127 = 0.1; 0.504 / 0.01 = 50.4 rounds to 50.
    values, scales = quantize_rows(torch.tensor([[0.504, -1.27], [12.7, 0.0]]))
    assert values.tolist() == [[50, -127], [127, 0]]
    assert torch.allclose(scales, torch.tensor([[0.01], [0.1]]))


def test_a_row_of_zeros_stays_zero() -> None:
    assert through_int8(torch.zeros(2, 3)).tolist() == [[0.0] * 3] * 2


def test_the_layer_computes_with_the_rounded_weights_and_the_bias() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(8, 4)
    inputs = torch.randn(5, 8)
    expected = inputs @ through_int8(linear.weight).T + linear.bias
    layer = Int8Linear(linear)
    assert torch.allclose(layer(inputs), expected, atol=1e-5)
    assert not torch.allclose(layer(inputs), linear(inputs), atol=1e-5)
    assert layer.values.dtype is torch.int8


def test_the_head_is_kept() -> None:
    model = nn.Sequential()
    model.add_module("body", nn.Sequential(nn.Linear(2, 2)))
    model.add_module("lm_head", nn.Linear(2, 2))
    assert quantize_linears(model) == ["body.0"]
    assert isinstance(model.lm_head, nn.Linear)
