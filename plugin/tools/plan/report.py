"""A plan, and what a search found, as JSON, as text for a terminal and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from plugin.observe.console import text_table
from plugin.observe.html_page import page
from plugin.tools.plan.estimates import (
    ASSUMED_UTILIZATION,
    GROUP_NAMES,
    rollout_memory,
    step_time,
    weight_sync,
)
from plugin.tools.plan.job_plan import RESERVED_BYTES, Advice, JobPlan
from plugin.tools.plan.layouts import describe, layout_flags, layout_settings
from plugin.tools.plan.search import SearchResult

_PARTS = (
    *("parameters", "gradients", "main_parameters", "optimizer"),
    *("activations", "logits", "other"),
)
#: What of a plan is a formula or an assumption, because shapes do not tell.
FORMULAS = (
    f"seconds: {ASSUMED_UTILIZATION:.0%} of the GPU's bfloat16 peak, messages at link speed; only "
    "those of data parallel ranks are hidden, where overlapped",
    "attention, norms and SwiGLU keep what fused kernels keep; context parallel attention is a "
    "ring of keys and values",
    f"{RESERVED_BYTES >> 30} GiB of every GPU for the driver, CUDA and NCCL",
    "experts get equal numbers of tokens",
    "--fp8 is planned in bfloat16: neither its faster products nor its float8 copies of weights (1 "
    "or 2 bytes each) are counted",
    "a critic (--advantage-estimator gae) holds what the policy holds; its messages and time are "
    "not counted",
    "KV cache: vLLM's 90 % of the memory, weights in the engine's dtype",
)


def as_json(plan: JobPlan, advice: Sequence[Advice] = ()) -> dict[str, Any]:
    """The whole plan as plain values."""
    gpu, batching = plan.gpu, plan.batching
    report: dict[str, Any] = {
        "model_type": plan.model.model_type,
        "total_parameters": plan.total_parameters,
        "world_size": plan.world_size,
        "layout": layout_settings(plan.config) | {"short": describe(plan.config)},
        "gpu": None if gpu is None else {"name": gpu.name, "memory_bytes": gpu.memory},
        "fits": plan.fits,
        "ranks": [
            {
                "kind": kind.kind,
                "count": kind.count,
                "example_rank": kind.example_rank,
                "parameters": kind.parameters,
                "trained_parameters": kind.trained,
                "bytes": {part: kind.bytes[part] for part in _PARTS},
                "peak_bytes": kind.peak_bytes,
                "flops": kind.flops,
                "extrapolated": kind.extrapolated,
            }
            for kind in plan.kinds
        ],
        "collectives": [
            {
                "kind": kind.kind,
                "group": GROUP_NAMES.get(group, "world"),
                "operation": operation,
                "count": count,
                "bytes": size,
            }
            for kind in plan.stages
            for (group, operation), (count, size) in sorted(kind.collectives.items())
        ],
        "weight_sync": weight_sync(plan),
        "batch": {
            "samples": batching.samples,
            "microbatches": batching.microbatches,
            "padding_microbatches": batching.padding,
            "padding_microbatch_share": batching.padding_share,
            "samples_beyond_the_budget": batching.oversize,
            "tokens_of_the_fullest_rank": max(batching.tokens),
            "work_balance": batching.balance,
            "bytes_per_rank": plan.batch_bytes,
        },
        "rollout": rollout_memory(plan),
        "formulas": list(FORMULAS),
        "advice": [vars(item) for item in advice],
    }
    if gpu is not None:
        time = step_time(plan, gpu)
        report["time"] = {
            "step_seconds": time.step,
            "bubble": time.bubble,
            "stage_balance": time.balance,
            "compute_seconds": time.compute,
            "message_seconds": time.messages,
            "flops": sum(kind.flops * kind.count for kind in plan.kinds),
        }
    return report


def _copies(sync: dict[str, Any]) -> str:
    """The copies of --weight-sync delta, if any."""
    if not sync["trainer_host_bytes"]:
        return ""
    return (
        f"; host memory for deltas: {_size(sync['trainer_host_bytes'])} of all ranks, "
        f"{_size(sync['engine_host_bytes'])} of every engine"
    )


def as_text(report: dict[str, Any]) -> list[str]:
    """Lines for a terminal, of what `as_json` gives."""
    gpu, batch, sync = report["gpu"], report["batch"], report["weight_sync"]
    lines = [
        f"{report['model_type']}, {_count(report['total_parameters'])} parameters, on "
        f"{report['world_size']} ranks: {report['layout']['short']}",
        "",
        *_memory_table(report),
        "",
        _verdict(report, gpu),
    ]
    lines += [
        f"  {a['flags']}: {_gib(a['peak_bytes'])}{' (fits)' if a['fits'] else ''}"
        for a in report["advice"]
    ]
    lines += [
        "",
        "communication of a step, per kind of rank (input bytes of a rank):",
        *_traffic(report),
        "",
        f"batch: {batch['samples']} samples in {batch['microbatches']} microbatches per rank, "
        f"{batch['padding_microbatch_share']:.1%} of them padding; the busiest data parallel rank "
        f"works {batch['work_balance']:.3f} times the mean; {_size(batch['bytes_per_rank'])} to "
        "each rank",
        f"weight sync: {_size(sync['bytes'])} to {sync['engines']} "
        f"engine{'' if sync['engines'] == 1 else 's'} by {sync['transport']} ({sync['links']})"
        f"{_copies(sync)}",
        *_expert_lines(sync),
        _rollout_line(report["rollout"]),
    ]
    if "time" in report:
        time = report["time"]
        lines.append(
            f"step: about {time['step_seconds']:.1f} s, {time['bubble']:.1%} of it bubble; "
            f"the slowest stage takes {time['stage_balance']:.2f} times the mean; "
            f"{time['flops']:.3g} FLOPs in all"
        )
    return [*lines, "", "by formula or assumption:", *(f"  {line}" for line in report["formulas"])]


_EXPERT_WAYS = {
    "own": "every rank sends its own",
    "gathered": "gathered by the stage's first rank",
    "sharded": "to the workers that own them alone",
}


def _expert_lines(sync: dict[str, Any]) -> list[str]:
    """What each way of sending experts costs, and which the job uses."""
    ways = sync.get("expert_ways", {})
    if not ways:
        return []
    told = []
    for name, way in ways.items():
        cost = f"{_size(way['worker_bytes'])} into a worker, {way['groups']} groups"
        if "seconds" in way:
            cost = f"{way['seconds']:.2f} s, {cost}"
        used = ", which the job does" if name == sync["expert_way"] else ""
        told.append(f"  {_EXPERT_WAYS[name]}: {cost}{used}")
    found = "the cheapest way for their experts"
    if all("seconds" in way for way in ways.values()):
        best = min(ways, key=lambda name: (ways[name]["seconds"], name != sync["expert_way"]))
        found += f": {_EXPERT_WAYS[best]}"
        if best == "sharded":
            found += " (not available: engines load whole experts)"
    return [f"{found}; by formula:", *told]


def _verdict(report: dict[str, Any], gpu: dict[str, Any] | None) -> str:
    if gpu is None:
        return "no GPU to compare with (--gpu none)"
    peak = max(rank["peak_bytes"] for rank in report["ranks"])
    share = f"{_gib(peak)} of the {_gib(gpu['memory_bytes'])} of a {gpu['name']}"
    if report["fits"]:
        return f"it fits: the fullest rank takes {share}"
    tail = "; these flags help most:" if report["advice"] else ""
    return f"it does NOT fit: the fullest rank needs {share}{tail}"


def _memory_table(report: dict[str, Any]) -> list[str]:
    # Where all numbers are trained, the column would say nothing.
    freezes = any(rank["trained_parameters"] < rank["parameters"] for rank in report["ranks"])
    head = [
        "kind of rank",
        "ranks",
        "params",
        *(["trained"] if freezes else []),
        *(p.replace("_", " ") for p in _PARTS),
        "peak",
    ]
    rows = [
        [
            rank["kind"],
            str(rank["count"]),
            _count(rank["parameters"]),
            *([_count(rank["trained_parameters"])] if freezes else []),
            *(_gib(rank["bytes"][part]) for part in _PARTS),
            _gib(rank["peak_bytes"]),
        ]
        for rank in report["ranks"]
    ]
    return text_table([head, *rows])


def _traffic(report: dict[str, Any]) -> list[str]:
    rows = [["  kind of rank", "group", "operation", "count", "bytes"]]
    for entry in report["collectives"]:
        rows.append(
            [
                f"  {entry['kind'].split(':')[0]}",
                entry["group"],
                entry["operation"],
                str(entry["count"]),
                _size(entry["bytes"]),
            ]
        )
    return text_table(rows)


def _rollout_line(rollout: dict[str, Any]) -> str:
    line = (
        f"rollout: {rollout['gpus_per_engine']} GPU per engine, "
        f"{_size(rollout['weight_bytes_per_gpu'])} of weights on each, "
        f"{_size(rollout['kv_bytes_per_token'])} of KV cache per token"
    )
    if "kv_tokens" not in rollout:
        return line
    if not rollout["fits"]:
        return f"{line}: an engine does NOT hold its weights and one sequence"
    return (
        f"{line}: room for {rollout['kv_tokens']} tokens, {rollout['sequences_of_mean_length']} "
        f"sequences of mean length, {rollout['sequences_of_largest_length']} of the largest"
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 1 << 27 or not size else _size(size)


def _count(number: float) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.3f} M"


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def search_json(result: SearchResult) -> dict[str, Any]:
    """Planned layouts in their order, each with its reason, and those that were left out."""
    return {
        "layouts": [asdict(candidate) | {"why": candidate.why} for candidate in result.planned],
        "left_out": [asdict(layout) for layout in result.left_out],
    }


def search_text(result: SearchResult, limit: int) -> list[str]:
    """Lines for a terminal: the table, the fastest layout's flags, what was left out."""
    rows = [["layout", "fits", "peak", "step", "bubble", "microbatches"]]
    for found in result.planned:
        numbers = ["-"] * 4
        if found.problem is None:
            numbers = [
                f"{found.peak_bytes / 2**30:.1f} GiB",
                f"{found.step_seconds:.2f} s",
                f"{found.bubble:.1%}",
                str(found.microbatches),
            ]
        rows.append([found.layout, "yes" if found.fits else "no", *numbers])
    # The reason is long and comes last, so it is not aligned.
    reasons = ["why", *(found.why for found in result.planned)]
    lines = [f"{line}  {why}" for line, why in zip(text_table(rows), reasons, strict=True)]
    if result.planned and result.planned[0].fits:
        best = result.planned[0]
        lines += ["", f"fastest that fits: {layout_flags(best.settings) or 'no parallel flags'}"]
    too_large = sum(layout.cause == "memory" for layout in result.left_out)
    slower = len(result.left_out) - too_large
    lines += [""] if result.left_out else []
    if too_large:
        lines.append(
            f"not planned: {too_large} layouts whose weights, gradients and optimizer state alone "
            "exceed the GPU"
        )
    if slower:
        lines.append(
            f"not planned: {slower} layouts that are slower by formula; --search-limit {limit} "
            "ends there, a higher one plans more"
        )
    return lines


#: Microbatches that the timeline shows; of more, the first ones.
_SHOWN = 12


def plan_html(report: dict[str, Any]) -> str:
    """One page from what `as_json` gives: ranks, the timeline of a step, bytes and messages."""
    stages = report["layout"]["pipeline_model_parallel_size"]
    data = dict(report) | {"problems": [], "footer": "made by megatron-tis plan"}
    time = report.get("time")
    if time is not None:
        chunks = report["layout"]["virtual_pipeline_model_parallel_size"] or 1
        count = min(report["batch"]["microbatches"], max(_SHOWN, stages * 2))
        per_stage = [
            c + m for c, m in zip(time["compute_seconds"], time["message_seconds"], strict=True)
        ]
        if len(per_stage) == stages and chunks == 1:
            durations = [seconds / report["batch"]["microbatches"] for seconds in per_stage]
            data["timeline"] = timeline(durations, count)
    subtitle = f"{report['world_size']:,} ranks, {report['layout']['short']}"
    parameters = report["total_parameters"] / 1e9
    title = f"Plan: {report['model_type']}, {parameters:.2f} B parameters"
    return page(title, subtitle, data, "plan.js")


def timeline(seconds: list[float], microbatches: int) -> list[list[dict[str, Any]]]:
    """Per stage, the forward and backward passes of a 1F1B schedule: start, length, microbatch.

    seconds: of forward and backward of one microbatch on every stage; a third of it is forward
    """
    stages = len(seconds)
    orders = [_schedule(stage, stages, microbatches) for stage in range(stages)]
    ends: dict[tuple[int, str, int], float] = {}
    rows: list[list[dict[str, Any]]] = [[] for _ in seconds]
    free, places = [0.0] * stages, [0] * stages
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for stage in range(stages):
            if places[stage] == len(orders[stage]):
                continue
            kind, number = orders[stage][places[stage]]
            before = stage - 1 if kind == "F" else stage + 1
            needs = (before, kind, number) if 0 <= before < stages else (stage, "F", number)
            if kind == "F" and stage == 0:
                ready = 0.0
            elif needs in ends:
                ready = ends[needs]
            else:
                continue
            start = max(free[stage], ready)
            length = seconds[stage] * (1 / 3 if kind == "F" else 2 / 3)
            free[stage] = ends[stage, kind, number] = start + length
            rows[stage].append({"kind": kind, "number": number, "start": start, "length": length})
            places[stage] += 1
    return rows


def _schedule(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """1F1B: forward passes fill the pipeline, then one of each in turn, backward ones drain it."""
    warm = min(stages - stage - 1, microbatches)
    order = [("F", number) for number in range(warm)]
    for number in range(microbatches - warm):
        order += [("F", warm + number), ("B", number)]
    return order + [("B", number) for number in range(microbatches - warm, microbatches)]
