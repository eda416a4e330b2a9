"""Tries the layouts of a number of GPUs and ranks them by the estimated time of a step.

A layout is planned by its fullest ranks, the first and the last stage. What was planned before is
read from a cache: the key is everything that the plan depends on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import plugin
from plugin.config import JobConfig
from plugin.errors import MegatronTisError
from plugin.observe.text_table import aligned
from plugin.plan.estimates import step_time
from plugin.plan.gpus import Gpu
from plugin.plan.job_plan import Models, plan_job
from plugin.plan.layouts import describe, possible_layouts
from plugin.plan.sample_lengths import SampleLengths


@dataclass(frozen=True)
class Candidate:
    """One layout, planned.

    messages, compute: seconds of the slower of the two stages; problem: why it cannot be planned
    """

    layout: str
    settings: dict[str, Any]
    fits: bool = False
    peak_bytes: int = 0
    step_seconds: float = 0.0
    compute: float = 0.0
    messages: float = 0.0
    bubble: float = 0.0
    microbatches: int = 0
    problem: str | None = None

    @property
    def why(self) -> str:
        """What its time and memory come from, in words."""
        parts = {
            "compute": self.compute,
            "messages": self.messages,
            "bubble": self.step_seconds * self.bubble,
        }
        total = sum(parts.values()) or 1.0
        shares = ", ".join(f"{name} {value / total:.0%}" for name, value in parts.items())
        return self.problem or (shares if self.fits else f"too large; {shares}")


def search_layouts(
    config: JobConfig,
    models: Models,
    lengths: SampleLengths,
    gpu: Gpu,
    *,
    most: int = 24,
    cache: Path | None = None,
    begin: Callable[[str], None] = lambda _: None,
) -> list[Candidate]:
    """Layouts that fit first, the fastest of them first; then those that do not, smallest first.

    most: layouts to plan; the plainest are taken
    """
    layouts = sorted(possible_layouts(config, models.policy), key=_cuts)[:most]
    found = []
    for number, layout in enumerate(layouts, 1):
        begin(f"{number}/{len(layouts)}: {describe(layout)}")
        found.append(_cached(layout, models, lengths, gpu, cache))
    return sorted(
        found,
        key=lambda c: (
            not c.fits,
            c.problem is not None,
            c.step_seconds if c.fits else c.peak_bytes,
        ),
    )


def _cuts(layout: JobConfig) -> tuple[int, int]:
    """How far a layout cuts the model: few cuts first, balanced between the ways of cutting."""
    sizes = (
        layout.tensor_model_parallel_size,
        layout.pipeline_model_parallel_size,
        layout.context_parallel_size,
        max(1, layout.expert_model_parallel_size // 8),
    )
    product = 1
    for size in sizes:
        product *= size
    return product, max(sizes)


def _cached(
    layout: JobConfig, models: Models, lengths: SampleLengths, gpu: Gpu, cache: Path | None
) -> Candidate:
    what = [
        plugin.__version__,
        {name: str(value) for name, value in sorted(vars(layout).items())},
        models.policy.to_json_string(),
        sorted((name, copy.to_json_string()) for name, copy in models.copies.items()),
        [lengths.prompts.tolist(), lengths.responses.tolist()],
        asdict(gpu),
    ]
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]
    file = None if cache is None else cache / f"{key}.json"
    if file is not None and file.is_file():
        return Candidate(**json.loads(file.read_text(encoding="utf-8")))
    candidate = _planned(layout, models, lengths, gpu)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(asdict(candidate)), encoding="utf-8")
        os.replace(partial, file)
    return candidate


def _planned(layout: JobConfig, models: Models, lengths: SampleLengths, gpu: Gpu) -> Candidate:
    sizes = {
        name: getattr(layout, name)
        for name in vars(layout)
        if name.endswith("_parallel_size") or name == "sequence_parallel"
    }
    base = Candidate(describe(layout), sizes)
    stages = layout.pipeline_model_parallel_size
    ranks = sorted({0, (stages - 1) * layout.world_size // stages})
    try:
        plan = plan_job(layout, models, lengths, gpu, ranks=ranks)
    except MegatronTisError as error:
        return replace(base, problem=str(error))
    time = step_time(plan, gpu)
    return replace(
        base,
        fits=bool(plan.fits),
        peak_bytes=plan.fullest.peak_bytes,
        step_seconds=time.step,
        compute=max(time.compute),
        messages=max(time.messages),
        bubble=time.bubble,
        microbatches=plan.batching.microbatches,
    )


def as_table(found: list[Candidate]) -> list[str]:
    """Lines for a terminal."""
    rows = [["layout", "fits", "peak", "step", "bubble", "microbatches", "why"]]
    for candidate in found:
        rows.append(
            [
                candidate.layout,
                "yes" if candidate.fits else "no",
                f"{candidate.peak_bytes / 2**30:.1f} GiB",
                f"{candidate.step_seconds:.2f} s",
                f"{candidate.bubble:.1%}",
                str(candidate.microbatches),
                candidate.why,
            ]
        )
    return aligned(rows)


def cache_directory() -> Path:
    """Where planned layouts are kept between calls."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "megatron-tis" / "plan"
