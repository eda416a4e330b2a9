"""LoRA: low-rank adapters beside the linear layers of a built Megatron-Core model.

A linear layer of Megatron may hold several of Hugging Face's: queries, keys and values interleaved
by group, or gate above up. Each of these has an adapter of its own, two matrices A [rank, inputs]
and B [outputs, rank], so that what is trained is what PEFT stores, to the bit.

The matrices are cut like the linear layer they hang on. Behind a column-parallel layer A is whole
on every rank and B is cut by outputs, behind a row-parallel one A is cut by inputs and B is whole.
What is exchanged is rank wide.

An adapter hangs on its layer as `lora` and adds to its output in a forward hook, so the layer may
be one of Megatron's or one of Transformer Engine's, and its own parameters keep their names.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

from plugin.config import TrainerConfig
from plugin.megatron_backend.hf_weights.bridge import canonical_name, weight_bridge
from plugin.megatron_backend.lora.targets import check_lora, chosen_targets
from plugin.megatron_backend.model.builder import first_expert, unwrap
from plugin.megatron_backend.parallel_groups import ParallelGroups

Cut = Literal["column", "row", "whole"]


@dataclass(frozen=True)
class Place:
    """How the weight of a linear layer is distributed over ranks.

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
    lora_B: [outputs, rank], cut by outputs behind a column-parallel layer; starts at 0
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
        """The adapters of the parts that have one."""
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
        """A x [..., rank], communicated as the layer's output on this rank needs it."""
        place = self.place
        # The dispatcher sums what the ranks of an expert compute, and their gradients of x.
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


#: How Megatron cuts its linear layers over tensor parallel ranks.
_CUTS: dict[str, Cut] = {
    "linear_qkv": "column",
    "linear_fc1": "column",
    "linear_q_proj": "column",
    "linear_q_up_proj": "column",
    "linear_kv_up_proj": "column",
    "linear_proj": "row",
    "linear_fc2": "row",
    "linear_q_down_proj": "whole",
    "linear_kv_down_proj": "whole",
}


@dataclass(frozen=True)
class LoraSettings:
    """What all adapters of a model have in common; targets: by their Hugging Face names."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / self.rank


def attach_adapters(
    chunks: Sequence[nn.Module], config: TrainerConfig, groups: ParallelGroups, seed: int
) -> None:
    """Freeze the chunks of a model and give their linear layers adapters; before DDP."""
    hf_config = unwrap(chunks[0]).hf_config
    check_lora(hf_config, config)
    settings = LoraSettings(config.lora_rank, config.lora_alpha, chosen_targets(hf_config, config))
    for model in map(unwrap, chunks):
        model.requires_grad_(False)
        model.lora = settings
        bridge = weight_bridge(model, groups)
        for name, linear in list(model.named_modules()):
            cut = _CUTS.get(name.rpartition(".")[2])
            if cut is not None:
                if ".mlp.experts." in name:
                    place = Place(cut, groups.etp_group, groups.collection.expt_dp, True, False)
                else:
                    sequence_parallel = model.config.sequence_parallel
                    place = Place(
                        cut, groups.tp_group, groups.dp_cp_group, False, sequence_parallel
                    )
                _attach(linear, name, place, model, bridge, groups, settings, seed)
                linear.register_forward_hook(_with_plain_gradient)
        if model.pre_process:
            model.embedding.register_forward_hook(_with_gradient)


def _with_gradient(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    """Recomputed layers propagate a gradient only if their input requires one."""
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _with_plain_gradient(_module: nn.Module, _inputs: Any, output: Any) -> None:
    """Give the gradient of a layer's output the strides that its matrix product is fast with.

    Behind row-parallel layers a gradient [s, 1, h] has strides (h, s * h, 1). `matmul` with a
    weight that needs no gradient takes that for a batch of s products of one row each. `contiguous`
    would change nothing: it ignores dimensions of size 1.
    """
    if output[0].requires_grad:
        output[0].register_hook(lambda g: g.reshape(-1, g.shape[-1]).view(g.shape))


def _attach(
    linear: nn.Module,
    name: str,
    place: Place,
    model: Any,
    bridge: Any,
    groups: ParallelGroups,
    settings: LoraSettings,
    seed: int,
) -> None:
    """Give a layer adapters; one of Transformer Engine's grouped layers, one set per expert."""
    made = []
    for own_name, weight in linear.named_parameters(recurse=False):
        if not own_name.startswith("weight"):
            continue
        canonical = canonical_name(f"{name}.{own_name}", model, first_expert(model, groups))
        hf_names = bridge._weight_name_mapping_mcore_to_hf(canonical)
        adapters = _adapters(hf_names, weight, place, model.config, settings, seed)
        if adapters is not None:
            weight.lora = adapters  # type: ignore[attr-defined]
            made.append(adapters)
    if made:
        single = isinstance(getattr(linear, "weight", None), Tensor)
        linear.lora = made[0] if single else nn.ModuleList(made)
        # First of all hooks: before a norm of the output.
        linear.register_forward_hook(_add_adapters, prepend=True)


def _adapters(
    hf_names: Sequence[str],
    weight: Tensor,
    place: Place,
    config: Any,
    settings: LoraSettings,
    seed: int,
) -> Adapters | None:
    """The adapters of a weight that is made of these Hugging Face tensors, if it has any."""
    groups, widths = 1, [weight.shape[0] // len(hf_names)] * len(hf_names)
    if len(hf_names) == 3:
        heads = config.num_attention_heads // config.num_query_groups
        widths = [heads * config.kv_channels, config.kv_channels, config.kv_channels]
        groups = weight.shape[0] // sum(widths)
    parts = []
    for hf_name, width in zip(hf_names, widths, strict=True):
        # Layers whose tensors have other names are not linear layers of their own.
        layer, _, kind = hf_name.rpartition(".")
        has_one = kind == "weight" and layer.rpartition(".")[2] in settings.targets
        rows = groups * width
        parts.append(LowRank(layer, weight, rows, settings.rank, place, seed) if has_one else None)
    if not any(parts):
        return None
    return Adapters(parts, widths, groups, place, settings.scale)


def _add_adapters(linear: Any, inputs: tuple[Any, ...], output: Any) -> Any:
    x = _normalized(linear, inputs[0])
    if isinstance(linear.lora, Adapters):
        if not linear.lora.enabled:
            return output
        return (output[0] + linear.lora(x), *output[1:])
    if not linear.lora[0].enabled:
        return output
    splits = [int(rows) for rows in inputs[1]]
    deltas = [own(rows) for own, rows in zip(linear.lora, x.split(splits), strict=True)]
    return (output[0] + torch.cat(deltas), *output[1:])


def _normalized(linear: Any, x: Tensor) -> Tensor:
    """What a layer multiplies: Transformer Engine's may have the norm before it inside."""
    weight = getattr(linear, "layer_norm_weight", None)
    if weight is None:
        return x
    gamma = weight.float() + (1.0 if linear.zero_centered_gamma else 0.0)
    return F.rms_norm(x.float(), (x.shape[-1],), gamma, linear.eps).to(x.dtype)


def lora_settings(chunks: Sequence[nn.Module]) -> LoraSettings | None:
    """What the adapters of a model have in common; None if it has none."""
    return getattr(unwrap(chunks[0]), "lora", None)


def low_ranks(chunks: Sequence[nn.Module]) -> Iterator[tuple[int, str, LowRank]]:
    """Number of the chunk, name in it and adapter, of every adapter on this rank."""
    for number, model in enumerate(map(unwrap, chunks)):
        for name, module in model.named_modules():
            if isinstance(module, LowRank):
                yield number, name, module


@contextmanager
def adapters_off(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Disable all adapters in the body: the model is its base."""
    held = [m for chunk in chunks for m in unwrap(chunk).modules() if isinstance(m, Adapters)]
    for adapters in held:
        adapters.enabled = False
    try:
        yield
    finally:
        for adapters in held:
            adapters.enabled = True
