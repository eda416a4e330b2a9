"""LoRA: low-rank adapters beside the linear layers of a built Megatron-Core model.

A linear layer of Megatron may hold several of Hugging Face's: queries, keys and values interleaved
by group, or gate above up. Each of these has an adapter of its own, two matrices A [rank, inputs]
and B [outputs, rank] (`low_rank.py`), so that what is trained is what PEFT stores, to the bit.

An adapter hangs on its layer as `lora` and adds to its output in a forward hook, so the layer may
be one of Megatron's or one of Transformer Engine's, and its own parameters keep their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plugin.config import TrainerConfig
from plugin.megatron_backend.hf_weights.bridge import canonical_name, weight_bridge
from plugin.megatron_backend.lora.low_rank import Adapters, Cut, LowRank, Place
from plugin.megatron_backend.lora.targets import check_lora, chosen_targets
from plugin.megatron_backend.model.builder import first_expert, unwrap
from plugin.megatron_backend.parallel_groups import ParallelGroups

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
