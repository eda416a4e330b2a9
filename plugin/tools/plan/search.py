"""Try the layouts of a number of GPUs and rank them by the estimated time of a step.

Formulas leave out what cannot fit or is far from the fastest. The others are planned by their
first, second and last stage, in which the fullest and the slowest ranks are. Layers that are alike
hold, send and compute the same, so every quantity of a rank is a straight line in its number of
layers: two points of it are planned, and that of the whole model follows.

What was planned before is read from a cache: the key is everything that the plan depends on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import plugin
from plugin.config import JobConfig
from plugin.errors import MegatronTisError
from plugin.megatron_backend.model.families import family_of
from plugin.megatron_backend.model.layout_rules import layers_per_stage, split_arguments
from plugin.tools.plan.estimates import message_seconds, step_time
from plugin.tools.plan.gpus import Gpu
from plugin.tools.plan.job_plan import JobPlan, Models, RankKind, decided, does_not_build, plan_job
from plugin.tools.plan.layouts import describe, layout_settings, possible_layouts
from plugin.tools.plan.rough_costs import RoughModel, rough_bytes, rough_seconds
from plugin.tools.plan.workload import SampleLengths, with_token_budget

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
        """What its time and memory come from, in words."""
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
    most: int = 24,
    cache: Path | None = None,
    begin: Callable[[int, int, str], None] = lambda *_: None,
) -> SearchResult:
    """Plan the `most` layouts that are fastest by formula among those that may fit.

    begin: called with number, total and name of the layout that is planned next
    """
    rough = RoughModel.of(models.policy, int(lengths.totals.sum()), len(models.copies))
    feasible, left_out = _feasible(config, models, rough, gpu)
    feasible = [with_token_budget(layout, models.policy, rough.counts, gpu) for layout in feasible]
    feasible.sort(key=lambda layout: rough_seconds(rough, decided(layout, gpu), gpu))
    for layout in feasible[most:]:
        seconds = rough_seconds(rough, decided(layout, gpu), gpu)
        reason = f"about {seconds:.1f} s by formula, slower than the {most} that are planned"
        left_out.append(LeftOut(describe(layout), layout_settings(layout), "time", reason))
    found = []
    for number, layout in enumerate(feasible[:most], 1):
        begin(number, len(feasible[:most]), describe(layout))
        found.append(_cached(layout, models, lengths, gpu, cache))
    return SearchResult(sorted(found, key=_order), left_out)


def _order(candidate: Candidate) -> tuple[bool, bool, float]:
    fits = candidate.fits
    size = candidate.step_seconds if fits else candidate.peak_bytes
    return not fits, candidate.problem is not None, size


def _feasible(
    config: JobConfig, models: Models, rough: RoughModel, gpu: Gpu
) -> tuple[list[JobConfig], list[LeftOut]]:
    """The layouts whose least fits into the GPU, and the others."""
    feasible, left_out = [], []
    for layout in possible_layouts(config, models.policy, _CHUNKS):
        least = rough_bytes(rough, layout)
        if least <= gpu.memory:
            feasible.append(layout)
            continue
        reason = (
            f"holds at least {least / 2**30:.1f} GiB before any activation, a {gpu.name} has "
            f"{gpu.memory / 2**30:.1f} GiB"
        )
        left_out.append(LeftOut(describe(layout), layout_settings(layout), "memory", reason))
    return feasible, left_out


def _cached(
    layout: JobConfig, models: Models, lengths: SampleLengths, gpu: Gpu, cache: Path | None
) -> Candidate:
    what = [
        _code_digest(),
        {name: str(value) for name, value in sorted(vars(layout).items())},
        models.policy.to_json_string(),
        sorted((name, copy.to_json_string()) for name, copy in models.copies.items()),
        [lengths.prompts.tolist(), lengths.responses.tolist()],
        asdict(gpu),
    ]
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]
    file = None if cache is None else cache / f"{key}.json"
    # A file that is missing, cut off or unreadable is planned again.
    with contextlib.suppress(OSError, ValueError, TypeError):
        if file is not None:
            return Candidate(**json.loads(file.read_text(encoding="utf-8")))
    candidate = Candidate(describe(layout), layout_settings(layout))
    try:
        candidate = _planned(candidate, layout, models, lengths, gpu)
    except MegatronTisError as error:
        candidate = replace(candidate, problem=str(error))
    except Exception as error:  # one layout that fails must not end the search
        return replace(candidate, problem=does_not_build(error))
    if file is not None:
        _keep(file, candidate)
    return candidate


def _keep(file: Path, candidate: Candidate) -> None:
    """Write a result for the next search; one that cannot be written is planned again then."""
    partial = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(asdict(candidate)), encoding="utf-8")
        os.replace(partial, file)
    except OSError as error:
        _warn_of_cache(f"results are not kept for the next search: {error}")


@cache
def _warn_of_cache(message: str) -> None:
    print(f"megatron-tis: {message}", file=sys.stderr)


@cache
def _code_digest() -> str:
    """Of all code that a plan runs: where that changes, layouts are planned again."""
    from megatron.core import __version__ as megatron_version

    digest = hashlib.sha256(f"{plugin.__version__} {megatron_version}".encode())
    for file in sorted(Path(plugin.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _planned(
    candidate: Candidate, layout: JobConfig, models: Models, lengths: SampleLengths, gpu: Gpu
) -> Candidate:
    plan = plan_by_layers(layout, models, lengths, gpu)
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


def cache_directory() -> Path:
    """Where planned layouts are kept between calls."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "megatron-tis" / "plan"


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
    if few is None or max(split) <= few[1] or not _layers_are_alike(models.policy, arguments):
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


def _layers_are_alike(model: Any, arguments: dict[str, Any]) -> bool:
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
