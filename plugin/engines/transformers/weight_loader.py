"""Weights into a transformers model, bucket by bucket, every tensor accounted for.

Names are those of a Hugging Face checkpoint on disk. transformers 5 fuses the experts of a layer
into two tensors; per-expert names are written into their slices. LoRA adapters, which have PEFT's
names, stay beside the layers that they belong to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plugin.engines.transformers.linear_layers import Int8Linear, through_int8
from plugin.errors import EngineError, WeightError
from plugin.weights.buckets import NO_WEIGHTS, read_bucket
from plugin.weights.checksums import Checksums, checksum
from plugin.weights.tensor_layout import TensorSpec

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")

_ADAPTER = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight$")


def is_adapter(name: str) -> bool:
    """Whether a tensor is a half of an adapter, by PEFT's names."""
    return _ADAPTER.match(name) is not None


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
        match = _ADAPTER.match(name)
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


class WeightLoader:
    """Writes weights into a model, bucket by bucket; a version counts once it is complete.

    lora_scale: versions have adapters, which are multiplied by this; the model's own weights come
        with the first one, and not every time after that
    """

    def __init__(
        self, model: nn.Module, *, int8: bool = False, lora_scale: float | None = None
    ) -> None:
        self._model = model
        self._int8 = int8
        self._targets = _saved_tensors(model)
        self._linears = {
            f"{name}.weight": module
            for name, module in model.named_modules()
            if isinstance(module, Int8Linear)
        }
        self._loading: int | None = None
        self._expected = self._expected_names()
        self._seen: set[str] = set()
        self._adapters = None if lora_scale is None else EngineAdapters(model, lora_scale)
        self.version = NO_WEIGHTS

    @property
    def is_partial(self) -> bool:
        """Whether a version has begun and not ended: the model then mixes two versions."""
        return self._loading is not None

    def require_complete(self, name: str) -> None:
        """An `EngineError` unless engine `name` has all weights of one version."""
        if self.version == NO_WEIGHTS or self.is_partial:
            state = "half of a new version" if self.is_partial else "no weights"
            raise EngineError(f"{name} has {state}; finish load_weights before generate")

    def load(self, version: int, bucket: bytes | np.ndarray, *, last: bool) -> None:
        """Take one bucket of `version`; the last one makes it current."""
        if self._loading is None:
            self.begin(version)
        if version != self._loading:
            raise WeightError(
                f"a bucket of version {version} arrived while version {self._loading} is incomplete"
            )
        self.take(read_bucket(bucket).items())
        if last:
            self.end()

    def begin(self, version: int) -> None:
        """Start a version; what was taken of an unfinished one counts no more."""
        if version <= self.version:
            raise WeightError(
                f"weights of version {version} arrived at an engine that has {self.version}; "
                "versions must grow"
            )
        self._loading, self._seen = version, set()

    @torch.no_grad()
    def take(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write some tensors of the version that was begun into the model."""
        for name, tensor in named_tensors:
            self._store(name, tensor)

    def place_of(self, spec: TensorSpec) -> Tensor | None:
        """The memory of a tensor of the version that was begun, which the caller writes then."""
        if self._is_left_out(spec.name):
            return None
        self._require_shape(spec.name, spec.shape, self._slice(spec.name))
        self._seen.add(spec.name)
        return self._slice(spec.name)

    def end(self) -> None:
        """Make the version that was begun current; a `WeightError` if a tensor is missing."""
        version, missing = self._loading, sorted(self._missing())
        assert version is not None
        if missing:
            raise WeightError(
                f"version {version} ended without {len(missing)} tensors, the first of them "
                f"{missing[0]}"
            )
        self._loading, self.version = None, version

    def checksums(self) -> Checksums | None:
        """Checksums of what the model computes with, by name; None with int8 or adapters.

        Only of tensors in the dtype that most of the model has: the trainer sums in that one.
        """
        if self._int8 or self._adapters is not None:
            return None
        dtype = next(iter(self._targets.values())).dtype
        tensors = {name: self._slice(name) for name in self._expected}
        head = getattr(self._model, "lm_head", None)
        if head is not None:  # of a tied one the checkpoint holds no tensor
            tensors["lm_head.weight"] = head.weight
        alike = {name: tensor for name, tensor in tensors.items() if tensor.dtype == dtype}
        return {name: checksum(tensor, dtype) for name, tensor in alike.items()}

    def _missing(self) -> set[str]:
        if self._adapters is None:
            return self._expected - self._seen
        known = self._adapters.names
        base = self._expected - self._seen
        if self.version != NO_WEIGHTS and len(base) == len(self._expected):
            base = set()  # none of them: those of the version before stay
        return base | (known - self._seen if known else {"adapters"})

    def _expected_names(self) -> set[str]:
        names = set(self._linears)
        for name, parameter in self._targets.items():
            prefix, _, kind = name.rpartition(".")
            # With biases (gpt-oss) a checkpoint holds the fused tensors as well.
            is_split = prefix.endswith(".experts") and f"{name}_bias" not in self._targets
            if is_split and kind in ("gate_up_proj", "down_proj"):
                parts = ("down",) if kind == "down_proj" else ("gate", "up")
                names |= {
                    f"{prefix}.{expert}.{part}_proj.weight"
                    for expert in range(parameter.shape[0])
                    for part in parts
                }
            else:
                names.add(name)
        return names

    def _store(self, name: str, tensor: Tensor) -> None:
        if self._adapters is not None and is_adapter(name):
            self._adapters.take(name, tensor, like=next(iter(self._targets.values())))
            self._seen.add(name)
            return
        if self._is_left_out(name):
            return
        target = self._linears.get(name)
        expected = self._slice(name) if target is None else target.values
        self._require_shape(name, tensor.shape, expected)
        if target is not None:
            target.load(tensor)
        else:
            is_expert = _EXPERT.match(name) is not None
            expected.copy_(through_int8(tensor) if self._int8 and is_expert else tensor)
        self._seen.add(name)

    def _is_left_out(self, name: str) -> bool:
        """Whether a checkpoint's tensor has no place; a `WeightError` if it should have one."""
        # A tied head may be exported although the model keeps it as the embedding.
        if name in self._expected or name == "lm_head.weight":
            return name not in self._expected
        raise WeightError(f"the engine's model has no {name}; both sides must use one config")

    @staticmethod
    def _require_shape(name: str, shape: Sequence[int], expected: Tensor) -> None:
        if tuple(shape) != expected.shape:
            raise WeightError(
                f"{name} has shape {list(shape)}, the engine expects {list(expected.shape)}"
            )

    def _slice(self, name: str) -> Tensor:
        """Where `name` is stored: a parameter, or one expert's part of a fused one."""
        match = _EXPERT.match(name)
        if match is None or name in self._targets:
            return self._targets[name]
        prefix, expert, part = match.group(1), int(match.group(2)), match.group(3)
        if part == "down":
            return self._targets[f"{prefix}.down_proj"][expert]
        gate, up = self._targets[f"{prefix}.gate_up_proj"][expert].chunk(2)
        return gate if part == "gate" else up


def _saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint of `model` holds: parameters, and buffers such as a router's bias."""
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        if not isinstance(module, Int8Linear):
            for name, held in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    tensors[f"{prefix}.{name}"] = held
    return tensors


def weight_ledger(hf_config: Mapping[str, Any], *, lora_scale: float | None = None) -> WeightLoader:
    """A loader that checks names, shapes, completeness and versions of buckets and stores nothing.

    For engines whose model lives elsewhere: `load` raises what an engine with this config would
    raise.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.for_model(**hf_config)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return WeightLoader(model, lora_scale=lora_scale)
