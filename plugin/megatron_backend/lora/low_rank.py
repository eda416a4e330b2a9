"""The two matrices of an adapter and what they compute, cut like the linear layer they hang on.

Behind a column-parallel layer A is whole on every rank and B is cut by outputs, behind a
row-parallel one A is cut by inputs and B is whole. What is exchanged is rank wide.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn

Cut = Literal["column", "row", "whole"]


@dataclass(frozen=True)
class Place:
    """Where the weight of a linear layer lies.

    group: ranks that it is cut over, the tensor parallel ones, or those of an expert
    copies: ranks that hold the same part of it
    sequence_parallel: its inputs (behind a row-parallel layer, its outputs) are a slice of the
        sequence
    """

    cut: Cut
    group: Any
    copies: Any
    is_expert: bool
    sequence_parallel: bool


class LowRank(nn.Module):
    """This rank's part of the adapter of one Hugging Face layer.

    lora_A: [rank, inputs], cut by inputs behind a row-parallel layer
    lora_B: [outputs, rank], cut by outputs behind a column-parallel layer; begins with 0
    name: of the layer, such as `model.layers.0.self_attn.q_proj`
    """

    def __init__(
        self, name: str, weight: Tensor, outputs: int, rank: int, place: Place, seed: int
    ) -> None:
        super().__init__()
        self.name, self.place = name, place
        cut_inputs = place.group.size() if place.cut == "row" else 1
        inputs = weight.shape[1] * cut_inputs
        # Drawn whole and by name: the same on every layout. As PEFT draws it.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        bound = 1 / math.sqrt(inputs)
        whole = torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator)
        mine = whole.chunk(cut_inputs, dim=1)[place.group.rank() if cut_inputs > 1 else 0]
        self.lora_A = nn.Parameter(mine.to(weight.device, weight.dtype, copy=True))
        self.lora_B = nn.Parameter(weight.new_zeros(outputs, rank))
        for parameter, axis in ((self.lora_A, self.axis_of_a), (self.lora_B, self.axis_of_b)):
            self._mark(parameter, axis, weight)

    @property
    def axis_of_a(self) -> int | None:
        """Along which A is cut."""
        return 1 if self.place.cut == "row" else None

    @property
    def axis_of_b(self) -> int | None:
        """Along which B is cut."""
        return 0 if self.place.cut == "column" else None

    def _mark(self, parameter: Any, axis: int | None, weight: Any) -> None:
        """Tell Megatron over which ranks gradients are summed and norms are counted."""
        place = self.place
        parameter.allreduce = getattr(weight, "allreduce", True)
        if axis is not None:
            set_tensor_model_parallel_attributes(parameter, True, axis, 1)
        elif place.is_expert and place.group.size() == 1:
            parameter.tensor_model_parallel = getattr(weight, "tensor_model_parallel", False)
        # Whole, and multiplied with a slice of the sequence: `finalize_model_grads` adds them up.
        parameter.sequence_parallel = axis is None and place.sequence_parallel


class Adapters(nn.Module):
    """The adapters of one weight of Megatron.

    Rows of the weight come in `groups` groups, each with `widths[i]` rows of part i. For 2 query
    groups of 2 heads of 16 on this rank, `groups` is 2 and `widths` is (32, 16, 16). A part that
    has no adapter is None.
    """

    def __init__(
        self,
        parts: Sequence[LowRank | None],
        widths: Sequence[int],
        groups: int,
        place: Place,
        scale: float,
    ) -> None:
        super().__init__()
        self.parts = list(parts)
        # Under their own names: `lora.q_proj.lora_A`.
        for part in self.adapters():
            self.add_module(part.name.rpartition(".")[2], part)
        self.widths, self.groups, self.place, self.scale = tuple(widths), groups, place, scale
        self.enabled = True

    def adapters(self) -> list[LowRank]:
        """Those of the parts that have one."""
        return [part for part in self.parts if part is not None]

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the layer's output: x [..., inputs] -> [..., outputs], on this rank."""
        there = self.adapters()
        low = F.linear(x, torch.cat([self._summed(part.lora_A, part.axis_of_a) for part in there]))
        low = self._exchanged(low) * self.scale
        rank = there[0].lora_A.shape[0]
        products = {
            part: F.linear(piece, self._summed(part.lora_B, part.axis_of_b))
            for part, piece in zip(there, low.split(rank, -1), strict=True)
        }
        return self._joined(
            [
                low.new_zeros(*low.shape[:-1], self.groups * width)
                if part is None
                else products[part]
                for part, width in zip(self.parts, self.widths, strict=True)
            ],
            axis=-1,
        )

    def merged(self, weight: Tensor) -> Tensor:
        """`weight` [outputs, inputs] with the adapters added to it, on this rank; or without."""
        if not self.enabled:
            return weight.detach()
        with torch.no_grad():
            deltas = [
                weight.new_zeros(self.groups * width, weight.shape[1], dtype=torch.float32)
                if part is None
                else part.lora_B.float() @ part.lora_A.float() * self.scale
                for part, width in zip(self.parts, self.widths, strict=True)
            ]
            return (weight.float() + self._joined(deltas, axis=0)).to(weight.dtype)

    def _joined(self, parts: list[Tensor], axis: int) -> Tensor:
        """Parts of all groups, interleaved by group as the weight has them."""
        if len(parts) == 1:
            return parts[0]
        grouped = [
            part.unflatten(axis, (self.groups, width))
            for part, width in zip(parts, self.widths, strict=True)
        ]
        inner = axis if axis < 0 else axis + 1
        return torch.cat(grouped, inner).flatten(inner - 1, inner)

    def _exchanged(self, low: Tensor) -> Tensor:
        """A x [..., rank] of what the layer's output on this rank is made of."""
        place = self.place
        # What the ranks of an expert compute, and their gradients of x, the dispatcher adds up.
        if place.cut == "whole" or place.is_expert or place.group.size() == 1:
            return low
        if place.cut == "column":
            if place.sequence_parallel:
                return gather_from_sequence_parallel_region(low, group=place.group)
            return copy_to_tensor_model_parallel_region(low, group=place.group)
        if place.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(low, group=place.group)
        return reduce_from_tensor_model_parallel_region(low, group=place.group)

    def _summed(self, matrix: Tensor, axis: int | None) -> Tensor:
        """A or B; where every rank of an expert holds it whole, each has a part of its gradient."""
        if axis is None and self.place.is_expert and self.place.group.size() > 1:
            return copy_to_tensor_model_parallel_region(matrix, group=self.place.group)
        return matrix
