"""What a checkpoint of a LoRA run holds of the model: its adapters, and which base they are of."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import (
    make_sharded_tensor_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
)
from torch import Tensor, nn

from plugin.megatron_backend.hf_weights.parameter_names import canonical_name
from plugin.megatron_backend.lora.adapters import lora_settings, low_ranks
from plugin.megatron_backend.model.builder import real_vocab_rows
from plugin.megatron_backend.model.model_chunks import model_tensors, unwrap
from plugin.megatron_backend.parallel_groups import ParallelGroups

_BITS = {4: torch.int32, 2: torch.int16}
#: Sums are taken modulo this, so that those of all ranks fit into 64 bits.
_MODULUS = 1 << 40


def sharded_adapters(chunks: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Per chunk, the adapters by their names in it, as sharded tensors for any layout."""
    state: list[dict[str, Any]] = [{} for _ in chunks]
    for number, name, low in low_ranks(chunks):
        for half, part, axis in (
            ("lora_A", low.lora_A, low.axis_of_a),
            ("lora_B", low.lora_B, low.axis_of_b),
        ):
            groups = {"tp_group": low.place.group, "dp_cp_group": low.place.copies}
            key = f"lora.{low.name}.{half}"
            state[number][f"{name}.{half}"] = (
                make_sharded_tensor_for_checkpoint(part, key, **groups)
                if axis is None
                else make_tp_sharded_tensor_for_checkpoint(part, key, axis, **groups)
            )
    return state


def load_adapter_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Put loaded tensors into the parameters of one chunk."""
    parameters = dict(unwrap(model).named_parameters())
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


def adapter_record(chunks: Sequence[nn.Module], groups: ParallelGroups) -> dict[str, Any]:
    """What the metadata says of adapters and their base, {} of a model without; a collective."""
    settings = lora_settings(chunks)
    if settings is None:
        return {}
    return {
        "rank": settings.rank,
        "alpha": settings.alpha,
        "targets": list(settings.targets),
        "base": base_fingerprint(chunks, groups),
    }


def base_fingerprint(chunks: Sequence[nn.Module], groups: ParallelGroups) -> str:
    """A number of the weights without adapters, the same on every layout; a collective.

    The bits of each tensor as integers, added up and multiplied by a checksum of its name: one
    changed weight changes it. Weights that several ranks hold are counted on one of them.
    """
    total = 0
    for model in map(unwrap, chunks):
        per_rank = (model.config.num_moe_experts or 0) // groups.ep_size
        for name, tensor in model_tensors(model):
            canonical = canonical_name(name, model, groups.ep_rank * per_rank)
            tied = canonical == "output_layer.weight" and model.hf_config.tie_word_embeddings
            if not tied and _counts(canonical, tensor, groups):
                bits = _without_padding(canonical, tensor, model.hf_config, groups)
                bits = bits.detach().contiguous().view(_BITS[tensor.element_size()])
                total += zlib.crc32(canonical.encode()) * int(bits.sum(dtype=torch.int64))
    device = next(chunks[0].parameters()).device
    whole = torch.tensor(total % _MODULUS, dtype=torch.int64, device=device)
    dist.all_reduce(whole)
    return f"{int(whole) % _MODULUS:010x}"


def _counts(canonical: str, tensor: Any, groups: ParallelGroups) -> bool:
    """Whether this rank is the one of those with the same values that counts them."""
    if ".mlp.experts." in canonical:
        return groups.collection.expt_dp.rank() == 0
    is_cut = getattr(tensor, "tensor_model_parallel", False)
    return groups.dp_cp_group.rank() == 0 and (is_cut or groups.tp_rank == 0)


def _without_padding(
    canonical: str, tensor: Tensor, hf_config: Any, groups: ParallelGroups
) -> Tensor:
    if canonical not in ("embedding.word_embeddings.weight", "output_layer.weight"):
        return tensor
    return tensor[: real_vocab_rows(hf_config.vocab_size, groups.tp_size, groups.tp_rank)]
