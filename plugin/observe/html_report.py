"""From run directories to one HTML report; `metric_table.py` says which metrics are drawn where."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from plugin.observe.html_page import located, page, series, write_page
from plugin.observe.learning import run_findings
from plugin.observe.metric_table import (
    CHARTS,
    SLICE_CHARTS,
    TILES,
    Chart,
    evaluation_chart,
    row_of,
)
from plugin.observe.run_record import RunRecord, read_run, read_samples

#: A drawn line has at most twice this many points: the lowest and the highest of every stretch.
MAX_STRETCHES = 600
#: Samples in a report, of all runs together, and characters of each text.
MAX_SAMPLES, MAX_TEXT = 300, 3000
#: The slices show the mean over this many last steps.
SLICE_STEPS = 20
_DASHES = ("", "5 3", "2 3")


#: Settings that differ between any two runs.
_OF_ONE_RUN = ("run_dir", "name")


def write_report(run_dirs: Sequence[str | Path], output: Path, *, force: bool) -> Path:
    """Read run directories and write one report over all of them."""
    return write_page(output, report_html([read_run(path) for path in run_dirs]), force=force)


def report_html(runs: Sequence[RunRecord]) -> str:
    """The report's text; runs are overlaid, one color each."""
    names = [run.name for run in runs]
    names = [n if names.count(n) == 1 else f"{n} ({i + 1})" for i, n in enumerate(names)]
    settings = [
        [key, *(_setting(run, key) for run in runs)]
        for key in dict.fromkeys(key for run in runs for key in run.config)
    ]
    data = {
        "runs": [
            {"id": i, "name": names[i], "path": str(run.path), "color": f"c{i % 8}"}
            for i, run in enumerate(runs)
        ],
        "tiles": _tiles(runs, names),
        "charts": [
            *_drawn(CHARTS[:1], runs, names),
            *_evaluation_charts(runs, names),
            *_drawn(CHARTS[1:], runs, names),
        ],
        "other": _drawn(_other_charts(runs), runs, names),
        "slices": [drawn for part in SLICE_CHARTS if (drawn := _slice(*part, runs, names))],
        "findings": [
            located(item, names[i] if len(runs) > 1 else "")
            for i, run in enumerate(runs)
            for item in run_findings(run)
        ],
        "checked": any((run.path / "findings.jsonl").exists() for run in runs),
        "samples": _samples(runs, names),
        "settings": settings,
        "different": [
            row for row in settings if row[0] not in _OF_ONE_RUN and len(set(row[1:])) > 1
        ],
        "problems": [problem for run in runs for problem in run.problems],
        "footer": f"megatron-tis · written {time.strftime('%Y-%m-%d %H:%M')} · works offline",
    }
    steps = ", ".join(str(len(run.steps)) for run in runs)
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs"
    return page(title, f"megatron-tis report · {steps} steps", data, "report.js")


def _samples(runs: Sequence[RunRecord], names: list[str]) -> list[dict[str, Any]]:
    """Samples to read, spread evenly over each run, the first and the last among them."""
    shown = []
    for run, name in zip(runs, names, strict=True):
        found = read_samples(run.path) if (run.path / "samples.jsonl").exists() else []
        most = MAX_SAMPLES // len(runs)
        stride = max(1.0, (len(found) - 1) / max(1, most - 1))
        places = {round(i * stride) for i in range(most) if round(i * stride) < len(found)}
        for place in sorted(places):
            texts = {key: _shortened(found[place].get(key)) for key in ("prompt", "response")}
            shown.append({**found[place], **texts, "run": name})
    return shown


def _shortened(text: Any) -> str:
    text = str(text)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} [...]"


def _setting(run: RunRecord, key: str) -> str:
    if key not in run.config:
        return "not recorded"
    return "none" if run.config[key] is None else str(run.config[key])


def _other_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """One chart for every further metric, whoever recorded it: a hook, a loss, the user's code."""
    shown = {name for chart in CHARTS for name in chart.metrics}
    found = {name for run in runs for record in run.steps for name in record}
    return [
        Chart(f"metric/{name}", name, "", {name: (name,)}, optional=True)
        for name in sorted(found - shown)
        if (row := row_of(name)) is None or row.own_chart
    ]


def _evaluation_charts(runs: Sequence[RunRecord], names: list[str]) -> list[dict[str, Any]]:
    """One chart per set, with pass@k of the smallest and the largest k."""
    found = {tuple(name.split("/")) for run in runs for line in run.evaluations for name in line}
    charts = []
    for name in sorted({parts[1] for parts in found if parts[0] == "eval"}):
        passes = {p[2] for p in found if p[:2] == ("eval", name) and p[2].startswith("pass@")}
        ks = sorted(int(key.removeprefix("pass@")) for key in passes)
        charts.append(evaluation_chart(name, dict.fromkeys((*ks[:1], *ks[-1:]))))
    return _drawn(charts, [replace(run, steps=run.evaluations) for run in runs], names)


def thinned(steps: Sequence[float], values: Sequence[float | None]) -> tuple[list, list]:
    """At most 2 * MAX_STRETCHES points: the extremes of each stretch, so that no spike is lost."""
    if len(steps) <= 2 * MAX_STRETCHES:
        return list(steps), list(values)
    chosen: set[int] = set()
    for part in range(MAX_STRETCHES):
        start, end = (len(steps) * p // MAX_STRETCHES for p in (part, part + 1))
        known = [(values[i], i) for i in range(start, end) if values[i] is not None]
        if known:
            chosen |= {min(known)[1], max(known)[1]}
    order = sorted(chosen)
    return [steps[i] for i in order], [values[i] for i in order]


def _drawn(
    charts: Sequence[Chart], runs: Sequence[RunRecord], names: list[str]
) -> list[dict[str, Any]]:
    """The charts as page/charts.js reads them, without optional ones that have no data."""
    return [drawn for chart in charts if (drawn := _chart(chart, runs, names))]


def _chart(chart: Chart, runs: Sequence[RunRecord], names: list[str]) -> dict[str, Any] | None:
    lines, bands = [], []
    alone = len(runs) == 1
    for i, run in enumerate(runs):
        steps = [record["step"] for record in run.steps]
        for number, (name, keys) in enumerate(chart.lines.items()):
            x, y = thinned(steps, _values(run, *keys))
            label = name if alone else f"{names[i]} {name}"
            kind = name if len(chart.lines) > 1 else ""
            # One run: a color per line. Several: a color per run, the lines differ by their dashes.
            style = {"color": f"c{number}"} if alone else {"dash": _DASHES[number]}
            lines.append(series(i, label, x, y, kind=kind, **style))
        stride = max(1, len(steps) // MAX_STRETCHES)
        for low, high, opacity in chart.bands:
            points = list(zip(steps, _values(run, low), _values(run, high), strict=True))[::stride]
            known = [point for point in points if None not in point]
            bands.append(
                {"run": i, "color": f"c{i % 8}", "opacity": opacity / math.sqrt(len(runs))}
                | {key: [p[j] for p in known] for j, key in enumerate(("x", "low", "high"))}
            )
    if chart.optional and not any(value is not None for line in lines for value in line["y"]):
        return None
    return {
        "id": chart.id,
        "title": chart.title,
        "note": chart.note,
        "missing": chart.missing,
        "log": chart.log,
        "series": lines,
        "bands": bands,
        "keyColors": alone,
        "floor": chart.floor,
        "ceiling": chart.ceiling,
        "marks": [] if chart.mark is None else [{"y": chart.mark}],
    }


def _values(run: RunRecord, *keys: str) -> list[float | None]:
    """One value per step of the first key that has any; None where it is missing or not finite."""
    for key in keys:
        values = [_number(record.get(key)) for record in run.steps]
        if any(value is not None for value in values):
            return values
    return [None] * len(run.steps)


def _number(value: Any) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def _slice(
    dimension: str, title: str, note: str, runs: Sequence[RunRecord], names: list[str]
) -> dict[str, Any] | None:
    prefix = f"mismatch/{dimension}/"
    keys = {key for run in runs for record in run.steps[-SLICE_STEPS:] for key in record}
    found = {key.split("/")[2] for key in keys if key.startswith(prefix) and key.endswith("/k3")}
    # A label is a range, `64-127` or `65536+`.
    labels = sorted(found, key=lambda label: float(label.split("-")[0].rstrip("+")))
    if not labels:
        return None
    lines = []
    for i, run in enumerate(runs):
        means = [_slice_mean(run, prefix + label) for label in labels]
        known = [(x, y) for x, y in enumerate(means) if y is not None]
        label = names[i] if len(runs) > 1 else "k3"
        lines.append(series(i, label, [x for x, _ in known], [y for _, y in known], dots=True))
    chart = {"id": dimension, "title": title, "note": note, "log": True}
    return chart | {"series": lines, "xLabels": labels}


def _slice_mean(run: RunRecord, prefix: str) -> float | None:
    """Mean k3 of a slice over the last steps, weighted by its tokens."""
    total = weight = 0.0
    for record in run.steps[-SLICE_STEPS:]:
        k3, tokens = (_number(record.get(f"{prefix}/{name}")) for name in ("k3", "tokens"))
        if k3 is not None and tokens:
            total, weight = total + k3 * tokens, weight + tokens
    return total / weight if weight else None


def _tiles(runs: Sequence[RunRecord], names: list[str]) -> list[dict[str, Any]]:
    if len(runs) > 1:
        return [
            {"label": f"reward, last steps · {name}", "value": _last_mean(run, "reward")}
            for name, run in zip(names, runs, strict=True)
        ][:8]
    rewards = [value for value in _values(runs[0], "reward") if value is not None]
    return [
        {"label": "steps", "value": str(len(runs[0].steps))},
        {"label": "reward, first step", "value": rewards[0] if rewards else None},
        *(
            {"label": f"{label}, last steps", "value": _last_mean(runs[0], key)}
            for label, key in TILES.items()
        ),
    ]


def _last_mean(run: RunRecord, key: str) -> float | None:
    known = [value for value in _values(run, key)[-5:] if value is not None]
    return sum(known) / len(known) if known else None
