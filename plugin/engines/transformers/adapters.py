"""LoRA adapters beside the linear layers of an engine's transformers model."""

from __future__ import annotations

import re
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from plugin.engines.transformers.int8_weights import Int8Linear
from plugin.errors import WeightError

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight$")


def is_adapter(name: str) -> bool:
    """Whether a tensor is a half of an adapter, by PEFT's names."""
    return _NAME.match(name) is not None


class EngineAdapters:
    """Adds scale * B A x to the output of every layer that has got an adapter."""

    def __init__(self, model: nn.Module, scale: float) -> None:
        self._scale = scale
        self._layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, (nn.Linear, Int8Linear))
        }
        self._held: dict[str, dict[str, Tensor]] = {}
        self.names: set[str] = set()

    def take(self, name: str, tensor: Tensor, like: Tensor) -> None:
        """Take a half of an adapter, with the dtype and on the device of `like`."""
        match = _NAME.match(name)
        assert match is not None
        layer, half = match.groups()
        if layer not in self._layers:
            raise WeightError(f"the engine's model has no linear layer {layer} for {name}")
        held = self._held.setdefault(layer, {})
        if half in held and held[half].shape == tensor.shape:
            held[half].copy_(tensor)
        else:
            held[half] = tensor.to(like.device, like.dtype, copy=True)
        if name not in self.names and len(held) == 2:
            self._layers[layer].register_forward_hook(self._hook(held))
        self.names.add(name)

    def _hook(self, held: dict[str, Tensor]) -> Any:
        def add(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            low = F.linear(inputs[0], held["A"])
            return output + F.linear(low, held["B"]) * self._scale

        return add
