"""Weight-only int8: what a quantized engine does to the weights, and hence to the log-probs.

One symmetric scale per output row. Embedding, LM head, norms and routers keep their dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values [..., out, in], float32 scales [..., out, 1]; their product is near `weight`.

    Example: a row [0.5, -1.27] has scale 0.01 and values [50, -127].
    """
    weight = weight.detach().float()
    scales = (weight.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=1e-12)
    return (weight / scales).round().to(torch.int8), scales


def through_int8(weight: Tensor) -> Tensor:
    """`weight` rounded to its int8 grid, in its own dtype."""
    values, scales = quantize_rows(weight)
    return (values.float() * scales).to(weight.dtype)


class Int8Linear(nn.Module):
    """A linear layer that stores 8-bit weights; the product is computed in the input's dtype."""

    values: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("values", torch.empty_like(linear.weight, dtype=torch.int8))
        self.register_buffer("scales", torch.empty(linear.out_features, dtype=torch.float32))
        self.bias = linear.bias
        self.load(linear.weight)

    def load(self, weight: Tensor) -> None:
        """Takes new weights [out, in]."""
        values, scales = quantize_rows(weight)
        self.values.copy_(values)
        self.scales.copy_(scales.squeeze(-1))

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        product = F.linear(inputs, self.values.to(inputs.dtype)) * self.scales.to(inputs.dtype)
        return product if self.bias is None else product + self.bias


def quantize_linears(model: nn.Module, keep: tuple[str, ...] = ("lm_head",)) -> list[str]:
    """Replace every linear layer of `model` but those named in `keep`; return the names."""
    linears = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name not in keep
    ]
    for name, linear in linears:
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], Int8Linear(linear))
    return [name for name, _ in linears]
