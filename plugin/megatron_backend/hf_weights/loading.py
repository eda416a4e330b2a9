"""Hugging Face weights into Megatron-Core chunks: every rank reads just the tensors it holds.

Also which tensors each parameter is made of, without reading any, for a plan of a job."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plugin.errors import WeightError
from plugin.megatron_backend.hf_weights.bridge import (
    GROUPED_EXPERT,
    VOCABULARY,
    canonical_name,
    canonical_tensors,
    weight_bridge,
)
from plugin.megatron_backend.hf_weights.export import entry_of
from plugin.megatron_backend.hf_weights.files import ExpertsByNumber, HfDirectory, split_by_expert
from plugin.megatron_backend.model.builder import (
    experts_per_rank,
    first_expert,
    model_tensors,
    unwrap,
)
from plugin.megatron_backend.model.families import FAMILIES, is_extra_layer
from plugin.megatron_backend.parallel_groups import ParallelGroups

_HF_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_PLAIN_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def load_hf_weights(
    chunks: Sequence[torch.nn.Module],
    source: str | Path | Mapping[str, Tensor],
    groups: ParallelGroups,
) -> None:
    """Fill this rank's parameters from a Hugging Face directory (safetensors) or state dict.

    No communication: each rank reads what it holds. An optimizer that keeps its own copy of the
    weights must reload them afterwards (`optimizer.reload_model_params()`).
    """
    models = [unwrap(chunk) for chunk in chunks]
    hf_config, bridge = models[0].hf_config, weight_bridge(models[0], groups)
    where = "the given state dict" if isinstance(source, Mapping) else str(source)
    family = FAMILIES[hf_config.model_type]
    weights: Mapping[str, Tensor] = (
        source if isinstance(source, Mapping) else HfDirectory(Path(source))
    )
    if isinstance(source, Mapping) and not family.fused_experts:
        weights = split_by_expert(source)
    names = [name for name in weights if not is_extra_layer(name, hf_config)]
    layers = {int(match.group(1)) for match in map(_HF_LAYER.match, names) if match}
    if layers != set(range(hf_config.num_hidden_layers)):
        raise WeightError(
            f"{where} holds {len(layers)} layers but the model has {hf_config.num_hidden_layers}; "
            "load weights that belong to the config"
        )
    unknown, _ = family.misfits(hf_config, weights)
    if unknown:
        raise WeightError(
            f"{where} holds {unknown[0]}, which a {hf_config.model_type} model does not have "
            f"({len(unknown)} such tensors); load weights that belong to the config"
        )
    if family.fused_experts:
        weights = ExpertsByNumber(weights)
    for model in models:
        for name, parameter in model_tensors(model):
            canonical = canonical_name(name, model, first_expert(model, groups))
            hf_names = bridge._weight_name_mapping_mcore_to_hf(canonical)
            if missing := [hf_name for hf_name in hf_names if hf_name not in weights]:
                raise WeightError(
                    f"{where} lacks {', '.join(missing)}, which {canonical} is made of; load "
                    "weights that belong to the config"
                )
            tensors = {hf_name: weights[hf_name] for hf_name in hf_names}
            for hf_name, tensor in tensors.items():
                if tensor.dtype not in _PLAIN_DTYPES:
                    raise WeightError(
                        f"{where}: {hf_name} is {tensor.dtype}, a quantized dtype; dequantize the "
                        "weights before they are loaded"
                    )
                if parameter.dtype is torch.float16:
                    _check_range(tensor, f"{where}: {hf_name}")
            with torch.no_grad():
                parameter.copy_(local_shard(canonical, parameter, tensors, bridge, groups))


def _check_range(tensor: Tensor, what: str) -> None:
    """Refuse values that overflow float16."""
    limit = torch.finfo(torch.float16).max
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    if largest > limit:
        raise WeightError(
            f"{what} holds {largest:.4g}, and the largest number of float16 is {limit:g}; use "
            "--train-dtype bfloat16 or float32"
        )


def local_shard(
    canonical: str,
    parameter: Tensor,
    tensors: Mapping[str, Tensor],
    bridge: Any,
    groups: ParallelGroups,
) -> Tensor:
    """This rank's part of one parameter, cut out of the Hugging Face tensors that it is made of."""
    size, rank = groups.tp_size, groups.tp_rank
    if GROUPED_EXPERT.search(canonical):
        size, rank = groups.etp_size, groups.etp_rank
    try:
        whole = bridge._weight_to_mcore_format(canonical, list(tensors.values()))
        shard = list(bridge._weight_split_across_tp(canonical, whole, parameter, size))[rank]
        if shard.shape == parameter.shape:
            return shard
        cause = None
    except (AssertionError, RuntimeError) as error:
        cause = error
    found = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    raise WeightError(
        f"{found} does not fit {canonical}, of which this rank holds {list(parameter.shape)}; "
        "load weights that belong to the config"
    ) from cause


def weight_sources(
    chunks: Sequence[torch.nn.Module],
    groups: ParallelGroups,
    shapes: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[str, list[str]]]:
    """Yield (parameter, Hugging Face tensors) of this stage, for the experts of all expert ranks.

    shapes: tensors by name, whose cuts are tried: a `WeightError` where one does not fit
    """
    models = [unwrap(chunk) for chunk in chunks]
    bridge = weight_bridge(models[0], groups)
    for model in models:
        per_rank = experts_per_rank(model, groups)
        for name, parameter in model_tensors(model):
            ranks = range(groups.ep_size) if ".experts." in name else range(1)
            for ep_rank in ranks:
                canonical = canonical_name(name, model, ep_rank * per_rank)
                names = bridge._weight_name_mapping_mcore_to_hf(canonical)
                if shapes is not None and all(source in shapes for source in names):
                    tensors = {source: shapes[source] for source in names}
                    local_shard(canonical, parameter, tensors, bridge, groups)
                yield canonical, names


def whole_parameters(chunks: Sequence[torch.nn.Module], groups: ParallelGroups) -> int:
    """Count this stage's parameters over all its ranks, without copies and vocabulary padding."""
    total = 0
    for name, parameter, model in canonical_tensors(chunks, groups, as_first_rank=True):
        shape = list(entry_of(name, parameter, groups).whole_shape)
        if name in VOCABULARY:
            shape[0] = model.hf_config.vocab_size
        total += math.prod(shape)
    return total
