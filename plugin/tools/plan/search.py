"""Try the layouts of a number of GPUs and rank them by the estimated time of a step.

Formulas leave out what cannot fit or is far from the fastest; only the order of their seconds
matters. The other layouts are planned by their first, second and last stage, which hold the fullest
and the slowest ranks. Identical layers hold, send and compute the same, so every quantity of a rank
is linear in its number of layers: two points are planned, and the whole model follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from plugin.config import JobConfig
from plugin.controller.preflight.resource_checks import WeightCounts, least_bytes
from plugin.errors import MegatronTisError
from plugin.megatron_backend.model.families import family_of
from plugin.megatron_backend.model.layout_rules import layers_per_stage, split_arguments
from plugin.tools.plan.estimates import (
    ASSUMED_UTILIZATION,
    Gpu,
    group_span,
    message_seconds,
    step_time,
)
from plugin.tools.plan.job_plan import (
    RESERVED_BYTES,
    JobPlan,
    Models,
    RankKind,
    build_error,
    plan_job,
    resolved,
)
from plugin.tools.plan.layouts import describe, layout_settings, possible_layouts, stage_ends
from plugin.tools.plan.workload import SampleLengths, whole_counts, with_token_budget

#: Model chunks per pipeline stage that are tried besides one; more of them send more messages.
_CHUNKS = (2, 4)


@dataclass(frozen=True)
class Candidate:
    """One layout, planned.

    messages, compute: seconds of the slowest stage; most_messages: which of them take longest
    problem: why it cannot be planned
    """

    layout: str
    settings: dict[str, Any]
    fits: bool = False
    peak_bytes: int = 0
    step_seconds: float = 0.0
    compute: float = 0.0
    messages: float = 0.0
    most_messages: str = ""
    bubble: float = 0.0
    microbatches: int = 0
    problem: str | None = None

    @property
    def why(self) -> str:
        """What its time is made of, in words."""
        if self.problem is not None:
            return self.problem
        parts = {
            "compute": self.compute,
            "messages": self.messages,
            "bubble": self.step_seconds * self.bubble,
        }
        total = sum(parts.values()) or 1.0
        shares = [f"{name} {value / total:.0%}" for name, value in parts.items()]
        if self.most_messages:
            shares[1] += f" (most: {self.most_messages})"
        return "; ".join([*([] if self.fits else ["too large"]), ", ".join(shares)])


@dataclass(frozen=True)
class LeftOut:
    """A layout that was not planned, and why: by formula it is too large or too slow."""

    layout: str
    settings: dict[str, Any]
    cause: Literal["memory", "time"]
    reason: str


@dataclass(frozen=True)
class SearchResult:
    """planned: those that fit first, the fastest of them first; then the others, smallest first."""

    planned: list[Candidate]
    left_out: list[LeftOut]


def search_layouts(
    config: JobConfig,
    models: Models,
    lengths: SampleLengths,
    gpu: Gpu,
    *,
    limit: int = 24,
    begin: Callable[[int, int, str], None] = lambda *_: None,
) -> SearchResult:
    """Plan the `limit` layouts that are fastest by formula among those that may fit.

    begin: called with number, total and name of the layout that is planned next
    """
    rough = RoughModel.of(models.policy, int(lengths.totals.sum()), len(models.copies))
    feasible: list[tuple[float, JobConfig]] = []
    left_out: list[LeftOut] = []

    def leave_out(layout: JobConfig, cause: Literal["memory", "time"], reason: str) -> None:
        left_out.append(LeftOut(describe(layout), layout_settings(layout), cause, reason))

    for layout in possible_layouts(config, models.policy, _CHUNKS):
        least = rough_bytes(rough, layout)
        if least <= gpu.memory:
            layout = with_token_budget(layout, models.policy, rough.counts, gpu)
            feasible.append((rough_seconds(rough, resolved(layout, gpu), gpu), layout))
        else:
            held, room = least / 2**30, gpu.memory / 2**30
            reason = f"holds at least {held:.1f} GiB before any activation, a {gpu.name} has"
            leave_out(layout, "memory", f"{reason} {room:.1f} GiB")
    feasible.sort(key=lambda entry: entry[0])
    for seconds, layout in feasible[limit:]:
        reason = f"about {seconds:.1f} s by formula, slower than the {limit} that are planned"
        leave_out(layout, "time", reason)
    planned = []
    for number, (_, layout) in enumerate(feasible[:limit], 1):
        begin(number, min(limit, len(feasible)), describe(layout))
        planned.append(_candidate(layout, models, lengths, gpu))
    planned.sort(
        key=lambda one: (
            not one.fits,
            one.problem is not None,
            one.step_seconds if one.fits else one.peak_bytes,
        )
    )
    return SearchResult(planned, left_out)


def _candidate(layout: JobConfig, models: Models, lengths: SampleLengths, gpu: Gpu) -> Candidate:
    candidate = Candidate(describe(layout), layout_settings(layout))
    try:
        plan = plan_by_layers(layout, models, lengths, gpu)
    except MegatronTisError as error:
        return replace(candidate, problem=str(error))
    except Exception as error:  # one layout that fails must not end the search
        return replace(candidate, problem=build_error(error))
    time = step_time(plan, gpu)
    busy = [c + m for c, m in zip(time.compute, time.messages, strict=True)]
    slowest = busy.index(max(busy))
    messages = message_seconds(plan, plan.stages[slowest], gpu)
    return replace(
        candidate,
        fits=bool(plan.fits),
        peak_bytes=plan.fullest.peak_bytes,
        step_seconds=time.step,
        compute=time.compute[slowest],
        messages=time.messages[slowest],
        most_messages=max(messages, key=messages.__getitem__) if any(messages.values()) else "",
        bubble=time.bubble,
        microbatches=plan.batching.microbatches,
    )


# -- by formula alone


@dataclass(frozen=True)
class RoughModel:
    """The numbers of a model and of a step that the formulas use.

    tokens: of all samples of a step; copies: models beside the policy, such as a reference
    head: parameters of the LM head
    """

    counts: WeightCounts
    layers: int
    hidden: int
    experts: int
    topk: int
    tokens: int
    copies: int = 0
    head: int = 0

    @classmethod
    def of(cls, hf_config: Any, tokens: int, copies: int) -> RoughModel:
        """Count the weights that transformers would build."""
        arguments = family_of(hf_config).transformer_arguments(hf_config)
        return cls(
            whole_counts(hf_config),
            arguments["num_layers"],
            hf_config.hidden_size,
            arguments.get("num_moe_experts", 0),
            arguments.get("moe_router_topk", 0),
            tokens,
            copies,
            hf_config.vocab_size * hf_config.hidden_size,
        )


def rough_bytes(model: RoughModel, config: JobConfig) -> int:
    """The least that a GPU must hold: no activations, the mean rank."""
    least = least_bytes(model.counts, config, on_cuda=True)
    copies = 0 if config.reference_offload else model.copies
    return least.total + copies * least.parameters + RESERVED_BYTES


def rough_seconds(model: RoughModel, config: JobConfig, gpu: Gpu) -> float:
    """A step's products, messages and bubble by formula."""
    tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    cp, ep = config.context_parallel_size, config.expert_model_parallel_size
    world, chunks = config.world_size, config.virtual_pipeline_model_parallel_size or 1
    active = model.counts.dense + model.counts.experts * model.topk / max(1, model.experts)
    imbalance = _imbalance(model, active, pp)
    compute = imbalance * 6 * active * model.tokens / world
    compute /= gpu.tflops * 1e12 * ASSUMED_UTILIZATION

    def link(name: str) -> float:
        ranks, distance = group_span(config, name, world)
        return gpu.link if (ranks - 1) * distance < config.ranks_per_node else gpu.network

    # Tokens that a tensor parallel group works on, and their hidden states in one layer.
    tokens = model.tokens * tp * pp / world
    states = 2 * tokens * model.hidden * imbalance * model.layers / pp
    # Forward and backward: gathers and scatters around attention and MLP; to the experts and back;
    # keys and values around the ring; hidden states to the next stage and their gradients back.
    messages = 8 * states * (tp - 1) / tp / link("tensor")
    messages += 4 * states / tp * model.topk * (ep - 1) / ep / link("expert")
    messages += 3 * states / tp * (cp - 1) / link("context")
    if pp > 1:
        messages += 4 * tokens * model.hidden / tp * chunks / link("pipeline")
    assert config.max_tokens_per_gpu != "auto"
    microbatches = max(1.0, tokens / (config.max_tokens_per_gpu or tokens))
    waiting = 1 + (pp - 1) / (chunks * microbatches)
    if chunks > 1:
        # The interleaved schedule runs whole rounds of microbatches, some of them padding.
        waiting *= pp * math.ceil(microbatches / pp) / microbatches
    if config.overlap_grad_reduce:
        return (compute + messages) * waiting
    held = (model.counts.dense / tp + model.counts.experts / ep) / pp
    return (compute + messages) * waiting + 6 * held / link("data x context")


def _imbalance(model: RoughModel, active: float, stages: int) -> float:
    """Work of the busiest pipeline stage over the mean: uneven layers, and the LM head in the last.

    active: parameters that a token is multiplied with in the whole model
    """
    if stages == 1:
        return 1.0
    head = model.head * model.layers / (active - model.head)  # in layers
    first, last = stage_ends(model.layers, stages)
    given = [end for end in (first, last) if end is not None]
    middle = (model.layers - sum(given)) / max(1, stages - len(given))
    at_end = (middle if last is None else last) + head
    return max(middle, first or 0, at_end) * stages / (model.layers + head)


# -- by two short models


def plan_by_layers(config: JobConfig, models: Models, lengths: SampleLengths, gpu: Gpu) -> JobPlan:
    """The plan of one rank of the first, the second and the last stage.

    The fullest and the slowest ranks are among them. Stages are planned whole where layers differ,
    where block recompute is not linear in their number, and where stages are short anyway.
    """
    stages = config.pipeline_model_parallel_size
    per_stage = config.world_size // stages
    chunks = config.virtual_pipeline_model_parallel_size
    arguments = family_of(models.policy).transformer_arguments(models.policy)
    sizes = {
        "pipeline_model_parallel_size": stages,
        "virtual_pipeline_model_parallel_size": chunks,
    }
    split = layers_per_stage(arguments | sizes | split_arguments(config))
    kinds_of_layers = getattr(models.policy, "layer_types", None) or ["full_attention"]
    moe_layers = arguments.get("moe_layer_freq", 1)
    alike = len(set(kinds_of_layers)) == 1
    alike &= moe_layers == 1 if isinstance(moe_layers, int) else all(moe_layers)
    # Layers of the short models: whole units of recompute.
    unit = (chunks or 1) * (config.recompute_num_layers or 1)
    if not alike or config.recompute_method == "block" or max(split) <= 2 * unit:
        ranks = [stage * per_stage for stage in sorted({0, min(1, stages - 1), stages - 1})]
        return plan_job(config, models, lengths, gpu, ranks=ranks, quick=True)
    ranks = [stage * per_stage for stage in sorted({0, stages - 1})]
    short, long = (
        plan_job(*_shortened(config, models, layers), lengths, gpu, ranks=ranks, quick=True)
        for layers in (unit, 2 * unit)
    )
    kinds = [
        _extrapolated(low, high, split[low.stage] / unit - 1)
        for low, high in zip(short.kinds, long.kinds, strict=True)
    ]
    if stages > 2 and split[1] > split[0]:
        # More layers than the first stage; a little too large, since it counts an embedding too.
        second = _extrapolated(short.kinds[0], long.kinds[0], split[1] / unit - 1)
        kinds.insert(1, replace(second, stage=1, kind="stage 1"))
    return replace(long, config=resolved(config, gpu), model=models.policy, kinds=kinds)


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


def _extrapolated(low: RankKind, high: RankKind, steps: float) -> RankKind:
    """The kind that is `steps` times as far from `low` as `high` is."""

    def at(first: float, second: float) -> int:
        return round(first + (second - first) * steps)

    none = (0, 0)
    keys = dict.fromkeys((*high.collectives, *low.collectives))
    pairs = {k: (low.collectives.get(k, none), high.collectives.get(k, none)) for k in keys}
    return replace(
        high,
        parameters=at(low.parameters, high.parameters),
        trained=at(low.trained, high.trained),
        bytes={part: max(0, at(low.bytes[part], size)) for part, size in high.bytes.items()},
        collectives={k: (at(a[0], b[0]), at(a[1], b[1])) for k, (a, b) in pairs.items()},
        flops=low.flops + (high.flops - low.flops) * steps,
    )
