"""Which tensors of a Hugging Face checkpoint each parameter is made of; nothing is read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plugin.megatron_backend.hf_weights.bridge import weight_bridge
from plugin.megatron_backend.hf_weights.expert_tensors import ExpertsByNumber, split_by_expert
from plugin.megatron_backend.hf_weights.gathered import entry_of
from plugin.megatron_backend.hf_weights.loading import local_shard
from plugin.megatron_backend.hf_weights.parameter_names import canonical_name
from plugin.megatron_backend.model.families import FAMILIES
from plugin.megatron_backend.model.model_chunks import experts_per_rank, model_tensors, unwrap
from plugin.megatron_backend.parallel_groups import ParallelGroups

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


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


def checkpoint_tensors(hf_config: Any) -> Mapping[str, Tensor]:
    """The tensors of a checkpoint as transformers builds them, not initialized, by expert."""
    from transformers import AutoModelForCausalLM, initialization

    with initialization.no_init_weights():
        model = AutoModelForCausalLM.from_config(hf_config)
    if FAMILIES[hf_config.model_type].fused_experts:
        return ExpertsByNumber(model.state_dict())
    return split_by_expert(model.state_dict())


def whole_parameters(chunks: Sequence[torch.nn.Module], groups: ParallelGroups) -> int:
    """Numbers of this stage's parameters over all its ranks: no copies, no vocabulary padding."""
    total = 0
    for model in (unwrap(chunk) for chunk in chunks):
        tied = bool(model.hf_config.tie_word_embeddings)
        for name, parameter in model_tensors(model):
            canonical = canonical_name(name, model, first_expert=0)
            if canonical == "output_layer.weight" and tied:
                continue  # the embedding once more, on the last of several stages
            shape: list[Any] = list(entry_of(canonical, parameter, groups).whole_shape)
            if canonical in _VOCABULARY:
                shape[0] = model.hf_config.vocab_size
            total += math.prod(shape)
    return total
