"""Linear weights of a model on CPU in the layout that oneDNN multiplies with.

A decode step multiplies few rows with every weight. There torch's own product spends up to two
thirds of its time on rearranging the weights (float32: 8 rows 28 against 85 GFLOP/s over an LM
head, 64 rows 102 against 195; bfloat16: 1.2 to 1.7x, with the same digits). Rearranged once per
version of the weights, they are only read. The copies take as much memory as the weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import mkldnn

from plugin.weights.buckets import NO_WEIGHTS

#: Weights with fewer numbers are multiplied faster as they are: a call of oneDNN costs more.
_FEWEST_NUMBERS = 100_000


class PackedLinears:
    """Has the large linear layers of a model on CPU multiply with packed copies of their weights.

    The model's own weights stay where they are; `follow` packs them again when they changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [
            _PackedLinear(module)
            for module in model.modules()
            if type(module) is nn.Linear and _can_pack(module.weight)
        ]
        self._version = NO_WEIGHTS

    def follow(self, version: int) -> None:
        """Pack the weights of `version`, unless they are packed."""
        if version == self._version:
            return
        for layer in self._layers:
            layer.pack()
        self._version = version

    def clear(self) -> None:
        """Give the memory of the copies up."""
        for layer in self._layers:
            layer.packed = None
        self._version = NO_WEIGHTS


class _PackedLinear:
    """Takes the place of a linear layer's `forward`, so that its hooks stay."""

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear
        self.packed: Tensor | None = None
        linear.forward = self.forward  # type: ignore[method-assign, assignment]

    def pack(self) -> None:
        self.packed = None  # its memory is free for the next one
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self._linear.weight.detach(), None)

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
