"""Experts of a layer in one tensor or in a tensor each: between the two.

Checkpoints of most families hold a tensor per expert, transformers 5 models in memory hold one per
layer; gpt-oss has one per layer in both. Megatron's experts have a number each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

_FUSED = re.compile(r"(.+\.mlp\.experts)\.([a-z]\w*)$")
_NUMBERED = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(\w+)$")


def split_by_expert(source: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with the fused expert tensors of transformers 5 models split by expert."""
    tensors = dict(source)
    for fused in [name for name in tensors if name.endswith(".mlp.experts.gate_up_proj")]:
        prefix = fused.removesuffix(".gate_up_proj")
        gate_up = tensors.pop(fused)  # [experts, 2 * ffn, hidden]
        down = tensors.pop(f"{prefix}.down_proj")  # [experts, hidden, ffn]
        for expert in range(gate_up.shape[0]):
            gate, up = gate_up[expert].chunk(2)
            tensors[f"{prefix}.{expert}.gate_proj.weight"] = gate
            tensors[f"{prefix}.{expert}.up_proj.weight"] = up
            tensors[f"{prefix}.{expert}.down_proj.weight"] = down[expert]
    return tensors


def numbered_experts(name: str, num_experts: int) -> list[str]:
    """The names under which `ExpertsByNumber` has the experts of a fused tensor; others as is."""
    match = _FUSED.match(name)
    if match is None:
        return [name]
    return [f"{match.group(1)}.{number}.{match.group(2)}" for number in range(num_experts)]


class ExpertsByNumber(Mapping[str, Tensor]):
    """Weights with fused experts, from which `...experts.3.down_proj` can be taken as well.

    The last fused tensor is kept: a layer's experts are read one after the other.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._kept: dict[str, tuple[str, Tensor]] = {}

    def __getitem__(self, name: str) -> Tensor:
        match = _NUMBERED.match(name)
        if match is None:
            return self._weights[name]
        prefix, number, part = match.groups()
        fused, kept = f"{prefix}.{part}", self._kept.get(part)
        if kept is None or kept[0] != fused:
            kept = self._kept[part] = (fused, self._weights[fused])
        return kept[1][int(number)]

    def __contains__(self, name: object) -> bool:
        match = _NUMBERED.match(str(name))
        return (f"{match.group(1)}.{match.group(3)}" if match else name) in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def joined_experts(
    tensors: Iterable[tuple[str, Tensor]], num_experts: int
) -> Iterator[tuple[str, Tensor]]:
    """Numbered experts stacked into one tensor once a layer has all; others as they are."""
    waiting: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors:
        match = _NUMBERED.match(name)
        if match is None:
            yield name, tensor
            continue
        fused = f"{match.group(1)}.{match.group(3)}"
        experts = waiting.setdefault(fused, {})
        experts[int(match.group(2))] = tensor
        if len(experts) == num_experts:
            yield fused, torch.stack([experts[number] for number in range(num_experts)])
            del waiting[fused]
