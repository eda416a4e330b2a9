"""Parallel layouts of a model on a number of GPUs, and those nearest to a given one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from plugin.config import JobConfig
from plugin.errors import ConfigError

_STAGES = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_SIZES = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "context_parallel_size": "CP",
    "expert_model_parallel_size": "EP",
    "expert_tensor_parallel_size": "ETP",
}
LAYOUT_FLAGS = (*_SIZES, *_STAGES, "virtual_pipeline_model_parallel_size", "sequence_parallel")


def describe(config: JobConfig) -> str:
    """A layout in the usual short form: TP8 PP4 EP8 SP; uneven stages as PP4[23..23]."""
    sizes = []
    for name, short in _SIZES.items():
        if getattr(config, name) > 1:
            sizes.append(f"{short}{getattr(config, name)}")
            first, last = (getattr(config, end) for end in _STAGES)
            if short == "PP" and (first or last):
                sizes[-1] += f"[{first or ''}..{last or ''}]"
    if config.virtual_pipeline_model_parallel_size:
        sizes.append(f"VPP{config.virtual_pipeline_model_parallel_size}")
    if config.sequence_parallel:
        sizes.append("SP")
    return " ".join(sizes) or "DP only"


def layout_settings(config: JobConfig) -> dict[str, Any]:
    """The parallel sizes by their flags' names."""
    return {name: getattr(config, name) for name in LAYOUT_FLAGS}


def layout_flags(settings: dict[str, Any]) -> str:
    """What `layout_settings` gives, as words of a command line; defaults are left out."""
    given = {k: v for k, v in settings.items() if v is True or v not in (None, False, 1)}
    return command_line(given)


def command_line(settings: dict[str, Any]) -> str:
    """Settings as words of a command line; True is a flag without a value."""
    return " ".join(
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in settings.items()
    )


def possible_layouts(
    config: JobConfig, hf_config: Any, chunks: Sequence[int] = ()
) -> Iterator[JobConfig]:
    """Every layout of the job's GPUs that the model can be cut into.

    Tensor parallel ranks stay on one node, context parallel ones are at most twice the job's.

    chunks: numbers of model chunks per stage that are tried besides one (interleaved schedule)
    """
    from plugin.megatron_backend.model.families import family_of
    from plugin.megatron_backend.model.layout_rules import check_model

    world, layers = config.world_size, hf_config.num_hidden_layers
    experts = family_of(hf_config).transformer_arguments(hf_config).get("num_moe_experts", 0)
    per_node = config.ranks_per_node
    for tp in _divisors(hf_config.num_key_value_heads, per_node):
        for pp in _divisors(world // tp, layers):
            for cp in _divisors(world // (tp * pp), config.context_parallel_size * 2):
                eps = _divisors(experts, world // pp) if experts else [1]
                for ep, vpp in product(eps, (None, *chunks) if pp > 1 else (None,)):
                    first, last = stage_ends(layers, pp)
                    sizes: dict[str, Any] = {
                        "tensor_model_parallel_size": tp,
                        "pipeline_model_parallel_size": pp,
                        "virtual_pipeline_model_parallel_size": vpp,
                        "decoder_first_pipeline_num_layers": first,
                        "decoder_last_pipeline_num_layers": last,
                        "account_for_embedding_in_pipeline_split": False,
                        "account_for_loss_in_pipeline_split": False,
                        "context_parallel_size": cp,
                        "expert_model_parallel_size": ep,
                        "expert_tensor_parallel_size": 1,
                        "sequence_parallel": tp > 1,
                        "num_gpus_per_node": per_node,
                    }
                    try:
                        layout = replace(config, **sizes)
                        check_model(hf_config, layout)
                    except ConfigError:
                        continue
                    yield layout


def stage_ends(layers: int, stages: int) -> tuple[int | None, int | None]:
    """Layers of the first and the last stage where they do not divide evenly, else None.

    The ends hold embedding and LM head, so they get the smaller share: 94 layers over 4 stages are
    23, 24, 24, 23; 61 are 15, 16, 16, 14.
    """
    if layers % stages == 0:
        return None, None
    if stages == 2:
        return layers - layers // 2, None  # of two, one decides the other
    middle = -(-layers // stages)
    ends = layers - middle * (stages - 2)
    if ends < 2:
        middle, ends = middle - 1, layers - (middle - 1) * (stages - 2)
    return ends - ends // 2, ends // 2


def nearest_layouts(sizes: dict[str, int], world: JobConfig, hf_config: Any) -> list[str]:
    """The three layouts that work and differ least from the wanted sizes."""

    def distance(layout: JobConfig) -> float:
        return sum(
            abs(math.log2(getattr(layout, name)) - math.log2(max(1, sizes.get(name, 1))))
            for name in _SIZES
        )

    found = sorted(possible_layouts(world, hf_config), key=distance)
    return [describe(layout) for layout in found[:3]]


def _divisors(value: int, most: int) -> list[int]:
    return [n for n in range(1, min(value, most) + 1) if value % n == 0]
