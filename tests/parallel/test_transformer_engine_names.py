"""Weights, checkpoints and replay find their way through modules with Transformer Engine's names.

The names are facts of Transformer Engine 2.11.0 (`pytorch/module/layernorm_linear.py`, `linear.py`, `grouped_linear.py`) as Megatron-Core
0.16.1 puts its modules into a layer: the norm before a linear layer is a parameter of that layer, and the experts of a rank are
parameters `weight0`, `weight1`, ... of one grouped layer. Each of these modules, and the attention, also has an `_extra_state`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

from plugin.config import TrainerConfig
from plugin.megatron_backend.checkpoint.sharded_state import load_sharded_state, sharded_state
from plugin.megatron_backend.hf_weights.export import export_hf_weights
from plugin.megatron_backend.hf_weights.loading import load_hf_weights
from plugin.megatron_backend.model.builder import build_model
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.routing.routes import RoutedModel
from tests.parallel import tiny_models
from tests.parallel.training_jobs import RunRanks

# hidden 32, 4 heads and 2 query groups of 16, dense width 48, expert width 24, 4 experts
ATTENTION = {
    "self_attention.linear_proj.weight": (32, 64),
    "self_attention.linear_qkv.layer_norm_weight": (32,),
    "self_attention.linear_qkv.weight": (128, 32),  # (4 + 2 * 2) heads of 16
    "self_attention.q_layernorm.weight": (16,),
    "self_attention.k_layernorm.weight": (16,),
}
DENSE = {
    "mlp.linear_fc1.layer_norm_weight": (32,),
    "mlp.linear_fc1.weight": (96, 32),  # gate and up
    "mlp.linear_fc2.weight": (32, 48),
}
MOE = {
    "pre_mlp_layernorm.weight": (32,),
    "mlp.router.weight": (4, 32),
    **{f"mlp.experts.linear_fc1.weight{expert}": (48, 32) for expert in range(4)},
    **{f"mlp.experts.linear_fc2.weight{expert}": (32, 24) for expert in range(4)},
}
WHOLE = {
    "embedding.word_embeddings.weight": (96, 32),
    "decoder.final_layernorm.weight": (32,),
    "output_layer.weight": (96, 32),
}
EXTRA_STATES = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.core_attention",
)


def facts(is_moe: list[bool]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter of a model whose layers are dense or MoE."""
    layers = {
        f"decoder.layers.{number}.{name}": shape
        for number, moe in enumerate(is_moe)
        for name, shape in (ATTENTION | (MOE if moe else DENSE)).items()
    }
    return WHOLE | layers


class GroupedLinear(nn.Module):
    """A grouped layer, described for a checkpoint as Megatron-Core's `TEGroupedLinear` describes it on one rank."""

    def __init__(self, weights: list[nn.Parameter], tp_group: Any) -> None:
        super().__init__()
        self.tp_group = tp_group
        for number, weight in enumerate(weights):
            self.register_parameter(f"weight{number}", weight)

    def sharded_state_dict(
        self, prefix: str, sharded_offsets: tuple[Any, ...], metadata: dict[str, Any]
    ) -> dict[str, Any]:
        weights = self.state_dict(keep_vars=True)
        described = {}
        for number, weight in enumerate(weights.values()):
            # The experts of a layer are slices of one tensor, along an axis of their own.
            place = (*sharded_offsets, (len(sharded_offsets), number, len(weights)))
            part = make_sharded_tensors_for_checkpoint(
                {"weight": weight},
                prefix,
                {"weight": 0},
                place,
                tp_group=self.tp_group,
                dp_cp_group=metadata["dp_cp_group"],
            )
            described[f"{prefix}weight{number}"] = part[f"{prefix}weight"]
        return described


class GroupedExperts(nn.Module):
    """Experts whose checkpoint is described by Megatron-Core's own `TEGroupedMLP`."""

    sharded_state_dict = TEGroupedMLP.sharded_state_dict

    def __init__(self, local: Any) -> None:
        super().__init__()
        self.config, self.num_local_experts = local.config, local.num_local_experts
        self.ep_group, self.tp_group = local.ep_group, local.tp_group


def stored(model: Any, groups: ParallelGroups) -> set[tuple[Any, ...]]:
    """What a checkpoint holds: names, and where in the tensor of that name each part is."""
    state = sharded_state([model], None, groups)
    apply_factories(state)
    return {
        (part.key, part.global_shape, part.global_offset, part.local_shape)
        for part in nested_values(state)
    }


def rename_like_transformer_engine(model: Any) -> None:
    """Move the parameters of a local model to where Transformer Engine's modules have them."""
    for layer in model.decoder.layers:
        attention, mlp = layer.self_attention, layer.mlp
        attention.linear_qkv.layer_norm_weight = layer.input_layernorm.weight
        layer.input_layernorm = nn.Identity()
        if not hasattr(mlp, "router"):
            mlp.linear_fc1.layer_norm_weight = layer.pre_mlp_layernorm.weight
            layer.pre_mlp_layernorm = nn.Identity()
            continue
        grouped = GroupedExperts(mlp.experts)
        for name in ("linear_fc1", "linear_fc2"):
            weights = [getattr(expert, name).weight for expert in mlp.experts.local_experts]
            setattr(grouped, name, GroupedLinear(weights, mlp.experts.tp_group))
        mlp.experts = grouped


def _no_state(_: Any) -> torch.Tensor:
    """What Transformer Engine returns where nothing is in FP8."""
    return torch.empty(0, dtype=torch.uint8)


def walk(groups: ParallelGroups, hf_config: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """Shapes by name, the weights that came back, the layers that routes bind to, and what loading says of extra states."""
    (model,) = build_model(hf_config, TrainerConfig(transformer_impl="local"), groups)
    of_local_layers = stored(model, groups)
    rename_like_transformer_engine(model)
    load_hf_weights([model], weights, groups)
    exported = {name: value.clone() for name, value in export_hf_weights([model], groups)}
    for place in EXTRA_STATES:
        part: Any = model.decoder.layers[0].get_submodule(place)
        methods = {"get_extra_state": _no_state, "set_extra_state": lambda self, state: None}
        part.__class__ = type("WithExtraState", (type(part),), methods)
    named = {f"decoder.layers.0.{place}._extra_state" for place in EXTRA_STATES}
    assert named <= model.state_dict().keys()
    of_these_names = stored(model, groups)
    # A checkpoint holds no extra state: empty without delayed FP8 scaling.
    state = {n: v for n, v in model.state_dict().items() if not n.endswith("_extra_state")}
    load_sharded_state({"model0": state}, [model], None)
    moe = hasattr(hf_config, "num_experts")
    return {
        "shapes": {name: tuple(value.shape) for name, value in model.named_parameters()},
        "exported": exported,
        "stored": (of_these_names, of_local_layers),
        "routed": sorted(RoutedModel.of([model]).routers) if moe else [],
    }


@pytest.mark.parametrize(
    ("hf_config", "is_moe", "routed"),
    [
        (tiny_models.tiny_qwen3(), [False] * 4, []),
        (tiny_models.tiny_qwen3_moe(mlp_only_layers=[0, 1]), [False, False, True, True], [0, 1]),
    ],
    ids=["dense", "moe"],
)
def test_import_export_checkpoint_and_replay_take_transformer_engines_names(
    run_ranks: RunRanks, hf_config: Any, is_moe: list[bool], routed: list[int]
) -> None:
    weights = tiny_models.hf_state_dict(hf_config)
    [found] = run_ranks(walk, 1, hf_config, weights)
    assert found["shapes"] == facts(is_moe)
    assert found["exported"].keys() == weights.keys()
    assert all(torch.equal(found["exported"][name], weights[name]) for name in weights)
    assert found["routed"] == routed
    # The same names and places: a checkpoint moves between Transformer Engine's layers and local ones.
    assert found["stored"][0] == found["stored"][1] and len(found["stored"][0]) > len(WHOLE)
