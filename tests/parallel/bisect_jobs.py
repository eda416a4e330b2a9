"""Engines with a planted fault, and the module-level functions in which ranks look for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plugin.engines.transformers.linear_layers import through_int8
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.tools.doctor.bisection import Bisection
from plugin.tools.doctor.bisection_runs import bisect_passes, random_sequences, verdict_of
from plugin.tools.doctor.layer_trace import load_trace, save_trace, trace_engine
from tests.parallel import tiny_models

Fault = tuple[Any, ...]
FLOAT32 = ("float32", "float32")
BFLOAT16 = ("float32", "bfloat16")


def plant(model: Any, fault: Fault) -> nn.Module:
    """Put one fault into a transformers model: (kind, layer, what)."""
    kind, number, what = fault
    layers = model.model.layers
    layer = None if number is None else layers[number]
    with torch.no_grad():
        if kind == "int8":
            weight = layer.get_parameter(what)
            weight.copy_(through_int8(weight))
        elif kind == "rope":
            turned = copy.deepcopy(model.model.rotary_emb)
            config = copy.deepcopy(model.config)
            config.rope_parameters = {**config.rope_parameters, "rope_theta": what}
            turned = type(turned)(config)
            for one in layers if layer is None else [layer]:
                one.self_attn.register_forward_pre_hook(_with_rotary(turned), with_kwargs=True)
        elif kind == "swapped experts":
            order = list(range(model.config.num_experts))
            order[what[0]], order[what[1]] = what[1], what[0]
            for name in ("gate_up_proj", "down_proj"):
                weight = layer.get_parameter(f"mlp.experts.{name}")
                weight.copy_(weight[order].clone())
        elif kind == "swapped router rows":
            weight = layer.mlp.gate.weight
            weight[list(what)] = weight[list(reversed(what))].clone()
        elif kind == "scaled":
            model.get_parameter(what).mul_(1.01)
        elif kind == "decode position":
            layer.self_attn.register_forward_pre_hook(_late_when_decoding(model), with_kwargs=True)
    return model


def _late_when_decoding(model: Any) -> Callable[..., Any]:
    """A hook that turns a decoded token as if it came one place later."""

    def hook(_module: Any, args: Any, kwargs: Any) -> Any:
        hidden, cache = kwargs["hidden_states"], kwargs["past_key_values"]
        if hidden.shape[1] > 1:
            return args, kwargs
        place = torch.tensor([[cache.get_seq_length(_module.layer_idx) + 1]])
        return args, {**kwargs, "position_embeddings": model.model.rotary_emb(hidden, place)}

    return hook


def _with_rotary(rotary: Any) -> Callable[..., Any]:
    """A hook that turns queries and keys by another base."""

    def hook(_module: Any, args: Any, kwargs: Any) -> Any:
        hidden = kwargs["hidden_states"]
        positions = torch.arange(hidden.shape[1])[None]
        return args, {**kwargs, "position_embeddings": rotary(hidden, positions)}

    return hook


def passes_of(
    groups: ParallelGroups,
    family: str,
    fault: Fault | None,
    dtypes: list[tuple[str, str]],
    decodes: bool = False,
) -> list[Bisection]:
    """Trainer and engine with the same weights, but for the fault."""
    config = tiny_models.FAMILIES[family]()

    def engine(dtype: str, _trainer: Any) -> nn.Module:
        model = tiny_models.hf_model(config, seed=3).to(getattr(torch, dtype))
        return model if fault is None else plant(model, fault)

    state = tiny_models.hf_state_dict(config, seed=3)
    sequences = random_sequences(config)
    return bisect_passes(groups, config, state, engine, sequences, dtypes=dtypes, decodes=decodes)


def find(
    groups: ParallelGroups,
    family: str,
    fault: Fault | None,
    dtypes: list[tuple[str, str]],
    decodes: bool = False,
) -> dict[str, Any]:
    """The verdict on an engine with a fault."""
    passes = passes_of(groups, family, fault, dtypes, decodes)
    return {**vars(verdict_of(passes)), "passes": [b.as_dict() for b in passes]}


def find_in_file(
    groups: ParallelGroups,
    family: str,
    fault: Fault | None,
    dtype: str,
    path: str,
    outputs_only: bool,
) -> dict[str, Any]:
    """The same from a file of the engine's hidden states."""
    config = tiny_models.FAMILIES[family]()
    model = tiny_models.hf_model(config, seed=3).to(getattr(torch, dtype))
    trace = trace_engine(model if fault is None else plant(model, fault), random_sequences(config))
    if outputs_only:
        kept = ("embedding", "log_probs")
        trace.states = {
            name: values
            for name, values in trace.states.items()
            if name in kept or name.endswith(".output")
        }
    save_trace(trace, Path(path))
    loaded = load_trace(Path(path), config)
    state = tiny_models.hf_state_dict(config, seed=3)
    passes = bisect_passes(groups, config, state, loaded, (), dtypes=[FLOAT32])
    return {**vars(verdict_of(passes)), "passes": [b.as_dict() for b in passes]}
