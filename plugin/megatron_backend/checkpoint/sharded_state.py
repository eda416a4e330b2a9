"""Model chunks and optimizer as Megatron-Core sharded state dicts that any layout can read.

Only tensors are stored, each under a name that depends on the model alone: not on the layout, not
on whether the distributed optimizer was used. Hyperparameters come from the configuration of the
run that loads, and the one number that Adam counts, its step, is in the checkpoint's own metadata.

A LoRA run stores its adapters of the model alone, and a fingerprint of the base they belong to.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import (
    make_sharded_tensor_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
)
from torch import Tensor, nn

from plugin.errors import CheckpointError
from plugin.megatron_backend.checkpoint.optimizer_shards import load_pieces, optimizer_pieces
from plugin.megatron_backend.hf_weights.bridge import VOCABULARY, canonical_tensors
from plugin.megatron_backend.lora.adapters import lora_settings, low_ranks
from plugin.megatron_backend.model.builder import (
    gather_updated_weights,
    real_vocab_rows,
    unwrap,
)
from plugin.megatron_backend.parallel_groups import ParallelGroups


def sharded_state(
    chunks: Sequence[Any],
    optimizer: MegatronOptimizer | None,
    groups: ParallelGroups,
    *,
    loading: bool = False,
) -> dict[str, Any]:
    """The state dict to save; with `loading`, the description of what to load.

    Of a model with adapters these alone: the rest of it is not trained.
    """
    if not loading:
        gather_updated_weights(chunks)
    content = {
        # One tensor per layer: layers of a MoE model differ, and any stage can pick its own.
        "non_homogeneous_layers": True,
        "dp_cp_group": groups.dp_cp_group,
    }
    if lora_settings(chunks) is None:
        models = [unwrap(chunk).sharded_state_dict(metadata=content) for chunk in chunks]
    else:
        models = sharded_adapters(chunks)
    state: dict[str, Any] = {
        # Without Transformer Engine's `_extra_state`: empty unless FP8 is used, and pickled.
        f"model{number}": {
            name: value for name, value in model.items() if not isinstance(value, ShardedObject)
        }
        for number, model in enumerate(models)
    }
    if optimizer is not None:
        parts = _parts(optimizer)
        for part in parts:
            _allocate_moments(part)
        of_models = dict(state)
        state["optimizer"] = {
            number: _optimizer_part(part, of_models, content, loading)
            for number, part in enumerate(parts)
        }
    return state


def _allocate_moments(part: Any) -> None:
    """Allocate what Adam would otherwise allocate in its first step: zeros."""
    inner = part.optimizer
    if isinstance(inner, HybridDeviceOptimizer):
        # Megatron makes one step with random gradients instead.
        for adam in inner.sub_optimizers:
            for parameter in (p for group in adam.param_groups for p in group["params"]):
                for name in ("exp_avg", "exp_avg_sq"):
                    adam.state[parameter].setdefault(name, torch.zeros_like(parameter))
    elif getattr(inner, "master_weights", False):
        # Megatron-Core 0.16 does not say what Transformer Engine's Adam has to know since 2.1:
        # whether main weights are what the model's weights lack. Not needed once it does.
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            if not inner.state[parameter]:
                inner.initialize_state(parameter, False)
    else:
        part.init_state_fn(inner, part.config)
    for adam in _adams(part):
        if _counts_per_parameter(adam):
            for moments in adam.state.values():
                moments.setdefault("step", torch.tensor(0.0, dtype=torch.float32))
    if isinstance(inner, HybridDeviceOptimizer):
        inner._sync_sub_optimizers_state_to_hdo()


def load_sharded_state(
    state: dict[str, Any], chunks: Sequence[Any], optimizer: MegatronOptimizer | None
) -> None:
    """Put tensors that `dist_checkpointing.load` returned into model and optimizer."""
    has_adapters = lora_settings(chunks) is not None
    for number, chunk in enumerate(chunks):
        if has_adapters:
            load_adapter_tensors(chunk, state[f"model{number}"])
            continue
        missing, unexpected = unwrap(chunk).load_state_dict(state[f"model{number}"], strict=False)
        lost = [name for name in missing if not name.endswith("_extra_state")]
        if lost or unexpected:
            raise CheckpointError(
                f"model chunk {number} misses {lost[:3]} and does not know {list(unexpected)[:3]}; "
                "load the checkpoint with the model that it was saved from"
            )
    if optimizer is not None:
        for number, part in enumerate(_parts(optimizer)):
            _load_optimizer_part(part, state["optimizer"][number])


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers of dense and of expert weights, as far as this rank has such weights."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if getattr(part, "optimizer", None) is not None]


def _optimizer_part(
    part: Any, models: dict[str, Any], content: dict[str, Any], loading: bool
) -> dict[str, Any]:
    if isinstance(part, DistributedOptimizer):
        return {"param_state": optimizer_pieces(part, models, loading=loading)}
    state = part.sharded_state_dict(models, is_loading=loading, metadata=content)
    # The step is stored elsewhere; what is left besides tensors is this run's configuration.
    state.get("optimizer", state)["state"].pop("common_step", None)
    return _keep_rest_local(state)


def _keep_rest_local(state: dict[str, Any]) -> dict[str, Any]:
    """Everything that is not a tensor is neither written nor read: it keeps its present value."""

    def wrap(value: Any) -> Any:
        kinds = (ShardedTensor, ShardedTensorFactory, LocalNonpersistentObject)
        return value if isinstance(value, kinds) else LocalNonpersistentObject(value)

    return dict_list_map_inplace(wrap, state)


def _load_optimizer_part(part: Any, state: dict[str, Any]) -> None:
    if not isinstance(part, DistributedOptimizer):
        if _counts_per_parameter(part.optimizer):
            # torch wants a step in every state; `set_optimizer_step` has the true one.
            state.get("optimizer", state)["state"]["common_step"] = torch.tensor(0.0)
        part.load_state_dict(state)
        return
    inner = part.optimizer
    with _without_step(inner):
        load_pieces(part, state["param_state"])
    if isinstance(inner, HybridDeviceOptimizer):
        inner._sync_hdo_state_to_sub_optimizers()
        inner._sync_sub_optimizers_state_to_hdo()


def _adams(part: Any) -> list[torch.optim.Optimizer]:
    """The optimizers that count steps: of an offloaded one those of host and device."""
    inner = part.optimizer
    return inner.sub_optimizers if isinstance(inner, HybridDeviceOptimizer) else [inner]


@contextmanager
def _without_step(inner: torch.optim.Optimizer) -> Iterator[None]:
    """Hide torch's per-parameter `step`: Megatron copies every state tensor but stores no step."""
    steps = {parameter: state.pop("step", None) for parameter, state in inner.state.items()}
    try:
        yield
    finally:
        for parameter, step in steps.items():
            if step is not None:
                inner.state[parameter]["step"] = step


def _counts_per_parameter(inner: torch.optim.Optimizer) -> bool:
    """torch's Adam counts steps per parameter, Apex's and Transformer Engine's per group."""
    return isinstance(inner, torch.optim.Adam)


def optimizer_step(optimizer: MegatronOptimizer) -> int:
    """How many updates Adam has made (what it corrects its bias with)."""
    counts = [0]
    for adam in (adam for part in _parts(optimizer) for adam in _adams(part)):
        per_parameter = _counts_per_parameter(adam)
        holders = adam.state.values() if per_parameter else adam.param_groups
        counts += [int(holder.get("step", 0)) for holder in holders]
    return max(counts)


def set_optimizer_step(optimizer: MegatronOptimizer, step: int) -> None:
    """Make Adam continue after `step` updates."""
    for adam in (adam for part in _parts(optimizer) for adam in _adams(part)):
        if _counts_per_parameter(adam):
            for state in adam.state.values():
                state["step"] = torch.tensor(float(step), dtype=torch.float32)
        else:
            for group in adam.param_groups:
                group["step"] = step


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
    """Adapters and their base for the metadata, {} for a model without any; a collective."""
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
    for name, tensor, model in canonical_tensors(chunks, groups):
        if _counts(name, tensor, groups):
            if name in VOCABULARY:
                size = model.hf_config.vocab_size
                tensor = tensor[: real_vocab_rows(size, groups.tp_size, groups.tp_rank)]
            bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()])
            total += zlib.crc32(name.encode()) * int(bits.sum(dtype=torch.int64))
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
