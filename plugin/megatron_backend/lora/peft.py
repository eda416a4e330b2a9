"""Adapters as PEFT directories: `adapter_config.json` and `adapter_model.safetensors`.

base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   [rank, inputs]
base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   [outputs, rank]
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from plugin.errors import WeightError
from plugin.megatron_backend.hf_weights.export import all_gathered
from plugin.megatron_backend.hf_weights.files import open_weights
from plugin.megatron_backend.lora.adapters import LoraSettings, LowRank, low_ranks
from plugin.megatron_backend.lora.targets import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PEFT_PREFIX,
)
from plugin.megatron_backend.model.builder import gather_updated_weights
from plugin.megatron_backend.parallel_groups import ParallelGroups


def _halves(adapter: LowRank) -> Iterator[tuple[str, Tensor, int | None]]:
    """PEFT's name, this rank's part and the axis that it is cut along, of A and of B."""
    name = f"{PEFT_PREFIX}{adapter.name}"
    yield f"{name}.lora_A.weight", adapter.lora_A, adapter.axis_of_a
    yield f"{name}.lora_B.weight", adapter.lora_B, adapter.axis_of_b


def export_adapters(
    chunks: Sequence[nn.Module], groups: ParallelGroups
) -> Iterator[tuple[str, Tensor]]:
    """Yield (PEFT's name, whole tensor) of this pipeline stage's adapters, on each of its ranks.

    Collective: all ranks of a stage must iterate to the end.
    """
    gather_updated_weights(chunks)
    held = [(half, low) for _, _, low in low_ranks(chunks) for half in _halves(low)]
    names: list[Any] = [[name for (name, _, _), _ in held]]
    if groups.ep_size > 1:
        # Expert ranks hold other experts at the same places.
        names = [None] * groups.ep_size
        mine = [name for (name, _, _), _ in held]
        dist.all_gather_object(names, mine, group=groups.ep_group)
    for number, ((name, part, axis), low) in enumerate(held):
        whole = part.detach()
        if axis is not None:
            whole = torch.cat(all_gathered(whole, low.place.group), axis)
        if not low.place.is_expert:
            yield name, whole
            continue
        experts = all_gathered(whole, groups.ep_group)
        yield from zip((of_rank[number] for of_rank in names), experts, strict=True)


def export_own_adapters(
    chunks: Sequence[nn.Module], groups: ParallelGroups
) -> Iterator[tuple[str, Tensor] | None]:
    """`export_adapters` as one round of what ranks send to engines; see `export_own_part`."""
    is_first = groups.dp_rank == groups.cp_rank == groups.tp_rank == 0
    for named in export_adapters(chunks, groups):
        if is_first:
            yield named
    yield None


def load_adapters(chunks: Sequence[nn.Module], directory: Path) -> None:
    """Fill this rank's adapters from a PEFT directory; no communication.

    An optimizer that keeps its own copy of the weights must reload them afterwards.
    """
    file = open_weights(directory / ADAPTER_WEIGHTS)
    there = set(file.keys())
    for _, _, low in low_ranks(chunks):
        for name, part, axis in _halves(low):
            if name not in there:
                raise WeightError(f"{directory} lacks {name}; give an adapter of this model")
            whole, group = file.get_tensor(name), low.place.group
            cut = group.size() if axis is not None else 1
            expected = [n * cut if i == axis else n for i, n in enumerate(part.shape)]
            if list(whole.shape) != expected:
                raise WeightError(
                    f"{directory}: {name} is {list(whole.shape)}, the model's adapter {expected}; "
                    "give an adapter of this model, and its rank as --lora-rank"
                )
            mine = whole if axis is None else whole.chunk(cut, axis)[group.rank()]
            with torch.no_grad():
                part.copy_(mine)


def save_peft_directory(
    directory: Path,
    chunks: Sequence[nn.Module],
    settings: LoraSettings,
    groups: ParallelGroups,
    base: str | None,
) -> None:
    """Write the adapters of a model in one process as a PEFT directory, complete or not at all.

    base: the model that they belong to, as PEFT is to find it
    """
    assert groups.world_size == 1
    tensors = {name: t.contiguous().clone() for name, t in export_adapters(chunks, groups)}
    alpha = settings.alpha
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": list(settings.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
    }
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_file(tensors, partial / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (partial / ADAPTER_CONFIG).write_text(json.dumps(described, indent=2) + "\n")
        partial.rename(directory)  # over an empty one, if any
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise WeightError(f"saving the adapters to {directory} failed: {error}") from error
