"""A plan with stages of few layers, from which that of the whole model follows.

Layers that are alike hold, send and compute the same, so every quantity of a rank is a straight
line in its number of layers. Two points of it are planned; a search does so for many layouts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plugin.config import JobConfig
from plugin.megatron_backend.model.families import family_of
from plugin.megatron_backend.model.pipeline_split import layers_per_stage, split_arguments
from plugin.tools.plan.gpus import Gpu
from plugin.tools.plan.job_plan import JobPlan, Models, RankKind, decided, plan_job
from plugin.tools.plan.sample_lengths import SampleLengths


def plan_by_layers(config: JobConfig, models: Models, lengths: SampleLengths, gpu: Gpu) -> JobPlan:
    """The plan of one rank of the first, the second and the last stage.

    The fullest and the slowest ranks are among them. Of a model whose layers differ, and where
    stages are short anyway, the stages are planned whole.
    """
    stages = config.pipeline_model_parallel_size
    ends = sorted({0, stages - 1})
    arguments = family_of(models.policy).transformer_arguments(models.policy)
    sizes = {
        name: getattr(config, name)
        for name in ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")
    }
    split = layers_per_stage(arguments | sizes | split_arguments(config))
    few = _few_layers(config)
    per_stage = config.world_size // stages
    if few is None or max(split) <= few[1] or not _alike(models.policy, arguments):
        ranks = [stage * per_stage for stage in sorted({*ends, min(1, stages - 1)})]
        return plan_job(config, models, lengths, gpu, ranks=ranks, quick=True)
    ranks = [stage * per_stage for stage in ends]
    short, long = (
        plan_job(*_shortened(config, models, count), lengths, gpu, ranks=ranks, quick=True)
        for count in few
    )
    kinds = []
    for low, high in zip(short.kinds, long.kinds, strict=True):
        beyond = (split[low.stage] - few[0]) / (few[1] - few[0])
        kinds.append(_on_line(low, high, beyond))
    if stages > 2 and split[1] > split[0]:
        # More layers than the first stage; a little too large, since it counts an embedding too.
        beyond = (split[1] - few[0]) / (few[1] - few[0])
        second = _on_line(short.kinds[0], long.kinds[0], beyond)
        kinds.insert(1, replace(second, stage=1, kind="stage 1"))
    return replace(long, config=decided(config, gpu), model=models.policy, kinds=kinds)


def _few_layers(config: JobConfig) -> tuple[int, int] | None:
    """Two numbers of layers per stage, whole units of recompute; None if a line does not do."""
    if config.recompute_method == "block":
        return None
    chunks = config.virtual_pipeline_model_parallel_size or 1
    unit = chunks * (config.recompute_num_layers or 1)
    return unit, 2 * unit


def _alike(model: Any, arguments: dict[str, Any]) -> bool:
    pattern = arguments.get("moe_layer_freq", 1)
    kinds = getattr(model, "layer_types", None) or ["full_attention"]
    return len(set(kinds)) == 1 and (pattern == 1 if isinstance(pattern, int) else all(pattern))


def _shortened(config: JobConfig, models: Models, layers: int) -> tuple[JobConfig, Models]:
    """The job with so many layers in every stage."""
    total = layers * config.pipeline_model_parallel_size
    even = replace(
        config, decoder_first_pipeline_num_layers=None, decoder_last_pipeline_num_layers=None
    )

    def cut(model: Any) -> Any:
        settings = model.to_dict() | {"num_hidden_layers": total}
        if settings.get("layer_types"):
            settings["layer_types"] = settings["layer_types"][:1] * total
        return type(model).from_dict(settings)

    copies = {name: cut(copy) for name, copy in models.copies.items()}
    return even, Models(cut(models.policy), copies)


def _on_line(low: RankKind, high: RankKind, beyond: float) -> RankKind:
    """The kind `beyond` times as far from `low` as `high` is."""

    def at(first: float, second: float) -> int:
        return round(first + (second - first) * beyond)

    none = (0, 0)
    keys = [*high.collectives, *(key for key in low.collectives if key not in high.collectives)]
    return replace(
        high,
        parameters=at(low.parameters, high.parameters),
        trained=at(low.trained, high.trained),
        bytes={part: max(0, at(low.bytes[part], size)) for part, size in high.bytes.items()},
        collectives={
            key: (
                at(low.collectives.get(key, none)[0], high.collectives.get(key, none)[0]),
                at(low.collectives.get(key, none)[1], high.collectives.get(key, none)[1]),
            )
            for key in keys
        },
        flops=low.flops + (high.flops - low.flops) * beyond,
    )
