"""The page of `megatron-tis plan --html`: the cluster by kind of rank, the timeline, the bytes."""

from __future__ import annotations

from typing import Any

from plugin.observe.html_page import page

#: Microbatches that the timeline shows; of more, the first ones.
_SHOWN = 12


def plan_html(report: dict[str, Any]) -> str:
    """One page from what `report.as_json` gives."""
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
    orders = [_order(stage, stages, microbatches) for stage in range(stages)]
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


def _order(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """1F1B: forward passes fill the pipeline, then one of each in turn, backward ones drain it."""
    warm = min(stages - stage - 1, microbatches)
    order = [("F", number) for number in range(warm)]
    for number in range(microbatches - warm):
        order += [("F", warm + number), ("B", number)]
    return order + [("B", number) for number in range(microbatches - warm, microbatches)]
