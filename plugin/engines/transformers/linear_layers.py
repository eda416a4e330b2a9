"""How the transformers engine computes linear layers: with packed weights, or from int8.

A decode step on CPU multiplies few rows with every weight. There torch's own product spends up to
two thirds of its time on rearranging the weights (float32: 8 rows 28 against 85 GFLOP/s over an LM
head, 64 rows 102 against 195; bfloat16: 1.2 to 1.7x, with the same digits). Rearranged for oneDNN
once per version of the weights, they are only read. The copies take as much memory as the weights.

Weight-only int8 is what a quantized engine does to the weights, and hence to the log-probs: one
symmetric scale per output row. Embedding, LM head, norms and routers keep their dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import mkldnn

#: Weights with fewer numbers are multiplied faster as they are: a call of oneDNN costs more.
_FEWEST_NUMBERS = 100_000


class PackedLinears:
    """Has the large linear layers of a model on CPU multiply with packed copies of their weights.

    The model's own weights stay where they are; `follow` packs again those that have changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [
            _PackedLinear(module)
            for module in model.modules()
            if type(module) is nn.Linear and _can_pack(module.weight)
        ]

    def follow(self, version: int) -> None:
        """Pack what is of another version, or was written to since, by whomever."""
        for layer in self._layers:
            layer.follow(version)

    def clear(self) -> None:
        """Give the memory of the copies up."""
        for layer in self._layers:
            layer.packed = layer.state = None


class _PackedLinear:
    """Takes the place of a linear layer's `forward`, so that its hooks stay."""

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear
        self.packed: Tensor | None = None
        self.state: tuple[int, int, int] | None = None
        linear.forward = self.forward  # type: ignore[method-assign, assignment]

    def follow(self, version: int) -> None:
        weight = self._linear.weight
        state = (version, weight._version, weight.data_ptr())
        if state == self.state:
            return
        self.packed = None  # its memory is free for the next one
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        self.state = state

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        if self.packed is None:
            return F.linear(inputs, self._linear.weight, self._linear.bias)
        return torch.ops.mkldnn._linear_pointwise(
            inputs, self.packed, self._linear.bias, "none", [], ""
        )


def _can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and weight.numel() >= _FEWEST_NUMBERS
        and mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


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
