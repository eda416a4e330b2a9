"""A parameter whole again: joined over tensor parallel ranks, expert ranks and pipeline stages.

Everything here is a collective of the ranks that hold a part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plugin.megatron_backend.hf_weights.parameter_names import GROUPED_EXPERT
from plugin.megatron_backend.parallel_groups import ParallelGroups


@dataclass(frozen=True)
class Entry:
    """What every pipeline stage must know about a parameter to take part in its export.

    name: canonical; experts are numbered as on expert rank 0, so that all expert ranks agree on it
    whole_shape: once merged over tensor parallel ranks; experts have the expert rank in front
    """

    name: str
    whole_shape: tuple[int, ...]
    dtype: torch.dtype
    is_sharded: bool


def entry_of(name: str, parameter: Tensor, groups: ParallelGroups) -> Entry:
    shape = list(parameter.shape)
    if expert := GROUPED_EXPERT.search(name):
        is_sharded = groups.etp_size > 1
        if is_sharded:
            shape[0 if expert.group(1) == "linear_fc1" else 1] *= groups.etp_size
        shape = [groups.ep_size, *shape]
    else:
        is_sharded = bool(getattr(parameter, "tensor_model_parallel", False))
        if is_sharded:
            shape[parameter.partition_dim] *= groups.tp_size  # type: ignore[attr-defined]
    return Entry(name, tuple(shape), parameter.dtype, is_sharded)


def whole_tensor(
    entry: Entry, parameter: Tensor | None, bridge: Any, groups: ParallelGroups
) -> Tensor:
    """A parameter merged over the ranks of its stage; empty memory for it where it is None.

    For an expert, those of all expert ranks are stacked in front.
    """
    if parameter is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.empty(entry.whole_shape, dtype=entry.dtype, device=device)
    whole = joined_shards(entry, parameter, bridge, groups)
    if GROUPED_EXPERT.search(entry.name):
        whole = torch.stack(all_gathered(whole, groups.ep_group))
    return whole


def joined_shards(entry: Entry, parameter: Tensor, bridge: Any, groups: ParallelGroups) -> Tensor:
    """A parameter joined over the tensor parallel ranks that have a shard of it.

    Adapters (`lora.py`) are added to it, unless they are switched off.
    """
    adapters = getattr(parameter, "lora", None)
    whole = parameter.detach() if adapters is None else adapters.merged(parameter)
    if entry.is_sharded:
        is_expert = GROUPED_EXPERT.search(entry.name) is not None
        shards = all_gathered(whole, groups.etp_group if is_expert else groups.tp_group)
        if len(shards) > 1:
            whole = bridge._weight_merge_across_tp(entry.name, shards, parameter)
    return whole


def on_all_stages(whole: Tensor, stage: int, groups: ParallelGroups) -> Tensor:
    """What pipeline stage `stage` has in `whole`, on every stage."""
    whole = whole.contiguous()
    source = dist.get_global_rank(groups.pp_group, stage)
    dist.broadcast(whole, src=source, group=groups.pp_group)
    return whole


def all_gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [tensor]
    tensor = tensor.contiguous()
    gathered = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(gathered, tensor, group=group)
    return gathered
