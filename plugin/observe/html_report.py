"""From run directories to one HTML report: which metrics are drawn where."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugin.observe.html_page import page, refuse_overwriting, write_page
from plugin.observe.run_files import RunRecord, read_run

#: A drawn line has at most twice this many points: the lowest and the highest of every stretch.
MAX_STRETCHES = 600
#: The slices show the mean over this many last steps.
SLICE_STEPS = 20


@dataclass(frozen=True)
class Line:
    """One line of a chart: the first of `keys` that a run has recorded."""

    label: str
    keys: tuple[str, ...]
    dash: str = ""


@dataclass(frozen=True)
class Panel:
    """One chart. `bands` are (low key, high key, opacity); an optional panel is left out without data."""

    id: str
    title: str
    note: str
    lines: tuple[Line, ...]
    bands: tuple[tuple[str, str, float], ...] = ()
    log: bool = False
    floor: float | None = None
    ceiling: float | None = None
    mark: float | None = None
    missing: str = "Not recorded in this run"
    optional: bool = False


_NEEDS_ROLLOUT = "Not recorded: it needs the rollout engine's log-probs"
PANELS: tuple[Panel, ...] = (
    Panel(
        "reward",
        "Reward",
        "Mean reward of the samples trained on.",
        (Line("reward", ("reward",)), Line("evaluation", ("eval_reward",), "5 3")),
    ),
    Panel(
        "mismatch_kl",
        "Mismatch KL",
        "KL of the rollout policy from the trained one, per token (k3). Noise of the engine stays flat; "
        "growth is a warning.",
        (
            Line("current policy", ("mismatch_kl",)),
            Line("start of the step", ("mismatch/k3",), "5 3"),
        ),
        log=True,
        missing=_NEEDS_ROLLOUT,
    ),
    Panel(
        "ratio_percentiles",
        "Ratio percentiles",
        "π_train / π_rollout before any correction: median, 25–75 %, 5–95 % and 1–99 %.",
        (Line("median", ("mismatch/ratio_p50",)),),
        bands=(
            ("mismatch/ratio_p01", "mismatch/ratio_p99", 0.12),
            ("mismatch/ratio_p05", "mismatch/ratio_p95", 0.16),
            ("mismatch/ratio_p25", "mismatch/ratio_p75", 0.25),
        ),
        log=True,
        mark=1.0,
        missing=_NEEDS_ROLLOUT,
    ),
    Panel(
        "ess",
        "Effective sample size",
        "ESS / N of the token weights: 1 means every token counts, 0.5 that half the batch is wasted.",
        (
            Line("before correction", ("mismatch/ess_share",), "5 3"),
            Line("after correction", ("mismatch/weight_ess_share",)),
        ),
        ceiling=1.0,
        missing=_NEEDS_ROLLOUT,
    ),
    Panel(
        "clipped",
        "Clipped fraction",
        "Tokens whose weight or policy ratio was bounded.",
        (
            Line("policy loss", ("pg_clipfrac",)),
            Line("weight, high", ("mismatch/clipped_high_share", "tis_clipfrac"), "5 3"),
            Line("weight, low", ("mismatch/clipped_low_share",), "2 3"),
        ),
        floor=0.0,
    ),
    Panel(
        "masked",
        "Masked fraction",
        "Tokens that a correction dropped, by the side on which their ratio left the band.",
        (
            Line("all", ("is_masked",)),
            Line("too high", ("is_masked_high", "mismatch/masked_high_share"), "5 3"),
            Line("too low", ("is_masked_low", "mismatch/masked_low_share"), "2 3"),
        ),
        floor=0.0,
        missing="Not recorded: no correction that masks is in use",
    ),
    Panel(
        "rollout_kl",
        "Rollout KL",
        "The KL term between the current and the rollout policy, as the loss sees it.",
        (Line("rollout KL", ("rollout_kl",)),),
        log=True,
        missing="Not recorded: --use-rollout-kl-loss is off",
    ),
    Panel(
        "grad_norm",
        "Gradient norm",
        "Of the whole model, before clipping. Spikes that follow a rise of the mismatch are off-policy noise.",
        (Line("gradient norm", ("grad_norm",)),),
        log=True,
    ),
    Panel(
        "staleness",
        "Weight staleness",
        "How many weight versions the rollouts were behind the trainer.",
        (
            Line("mean", ("staleness",)),
            Line("oldest", ("staleness_max", "max_staleness"), "5 3"),
        ),
        floor=0.0,
    ),
    Panel(
        "throughput",
        "Throughput",
        "Tokens per second of wall clock.",
        (Line("tokens/s", ("tokens_per_second",)),),
        floor=0.0,
    ),
    Panel("loss", "Loss", "The whole loss, all terms.", (Line("loss", ("loss",)),)),
    Panel(
        "entropy",
        "Entropy",
        "Mean entropy of the policy at the sampled tokens.",
        (Line("entropy", ("entropy", "entropy_loss")),),
        optional=True,
    ),
    Panel(
        "extremes",
        "Largest and smallest ratio",
        "True extremes over every rank, before correction.",
        (
            Line("largest", ("mismatch/ratio_max",)),
            Line("smallest", ("mismatch/ratio_min",), "5 3"),
        ),
        log=True,
        mark=1.0,
        optional=True,
    ),
    Panel(
        "response_length",
        "Response length",
        "Mean number of response tokens.",
        (Line("tokens", ("response_length", "mean_response_length")),),
        floor=0.0,
        optional=True,
    ),
)
_SLICES = (
    ("by_position", "By position in the response", "k3 of the tokens at these positions."),
    ("by_staleness", "By weight staleness", "k3 of the tokens sampled by weights this old."),
    (
        "by_rollout_prob",
        "By rollout probability",
        "k3 of the tokens whose probability was in this range when sampled.",
    ),
)


def write_report(run_dirs: Sequence[str | Path], output: Path, *, force: bool) -> Path:
    """Read run directories and write one report over all of them."""
    refuse_overwriting(output, force)
    return write_page(output, report_html([read_run(path) for path in run_dirs]), force=force)


def report_html(runs: Sequence[RunRecord]) -> str:
    """The report's text; runs are overlaid, one color each."""
    names = _distinct_names(runs)
    data = {
        "runs": [
            {"id": i, "name": names[i], "path": str(run.path), "color": _color(i)}
            for i, run in enumerate(runs)
        ],
        "tiles": _tiles(runs),
        "charts": [chart for panel in PANELS if (chart := _chart(panel, runs, names))],
        "slices": [chart for part in _SLICES if (chart := _slice_chart(*part, runs, names))],
        "findings": [
            _finding(item, names[i]) for i, run in enumerate(runs) for item in run.findings[-50:]
        ],
        "checked": any((run.path / "findings.jsonl").exists() for run in runs),
        "settings": _settings(runs, different_only=False),
        "different": _settings(runs, different_only=True) if len(runs) > 1 else [],
        "problems": [problem for run in runs for problem in run.problems],
        "footer": f"megatron-tis · written {time.strftime('%Y-%m-%d %H:%M')} · one file, works offline",
    }
    steps = ", ".join(str(len(run.steps)) for run in runs)
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs"
    return page(title, f"megatron-tis report · {steps} steps", data, ["report.js"])


def thinned(steps: Sequence[float], values: Sequence[float | None]) -> tuple[list, list]:
    """At most 2 * MAX_STRETCHES points: the lowest and highest of each stretch, so that no spike is lost."""
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


def _chart(panel: Panel, runs: Sequence[RunRecord], names: list[str]) -> dict[str, Any] | None:
    series: list[dict[str, Any]] = []
    bands: list[dict[str, Any]] = []
    for i, run in enumerate(runs):
        steps = [record["step"] for record in run.steps]
        for number, line in enumerate(panel.lines):
            x, y = thinned(steps, _values(run, line.keys))
            label = line.label if len(runs) == 1 else f"{names[i]} {line.label}"
            kind = line.label if len(panel.lines) > 1 else ""
            # One run: a color per line. Several: a color per run, the lines differ by their dashes.
            color = _color(number if len(runs) == 1 else i)
            dash = line.dash if len(runs) > 1 else ""
            series.append(
                {"run": i, "label": label, "kind": kind, "color": color, "dash": dash}
                | {"x": x, "y": y}
            )
        for low, high, opacity in panel.bands:
            bands.append(
                {"run": i, "color": _color(i), "opacity": opacity / math.sqrt(len(runs))}
                | _band(run, steps, low, high)
            )
    if panel.optional and not any(value is not None for s in series for value in s["y"]):
        return None
    chart: dict[str, Any] = {"id": panel.id, "title": panel.title, "note": panel.note}
    chart |= {"log": panel.log, "series": series, "bands": bands, "missing": panel.missing}
    chart["keyColors"] = len(runs) == 1
    chart |= {
        name: value
        for name, value in (("floor", panel.floor), ("ceiling", panel.ceiling))
        if value is not None
    }
    if panel.mark is not None:
        chart["marks"] = [{"y": panel.mark}]
    return chart


def _band(run: RunRecord, steps: list[float], low: str, high: str) -> dict[str, list]:
    lows, highs = _values(run, (low,)), _values(run, (high,))
    stride = max(1, len(steps) // MAX_STRETCHES)
    known = [
        i for i in range(0, len(steps), stride) if lows[i] is not None and highs[i] is not None
    ]
    return {
        "x": [steps[i] for i in known],
        "low": [lows[i] for i in known],
        "high": [highs[i] for i in known],
    }


def _values(run: RunRecord, keys: Sequence[str]) -> list[float | None]:
    for key in keys:
        values = [_number(record.get(key)) for record in run.steps]
        if any(value is not None for value in values):
            return values
    return [None] * len(run.steps)


def _number(value: Any) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def _slice_chart(
    dimension: str, title: str, note: str, runs: Sequence[RunRecord], names: list[str]
) -> dict[str, Any] | None:
    labels = _slice_labels(dimension, runs)
    if not labels:
        return None
    series = []
    for i, run in enumerate(runs):
        values = [_slice_mean(run, f"mismatch/{dimension}/{label}") for label in labels]
        known = [(x, y) for x, y in enumerate(values) if y is not None]
        series.append(
            {"run": i, "label": names[i] if len(runs) > 1 else "k3", "color": _color(i)}
            | {"dots": True, "x": [x for x, _ in known], "y": [y for _, y in known]}
        )
    return {
        "id": dimension,
        "title": title,
        "note": note,
        "log": True,
        "series": series,
        "xLabels": labels,
    }


def _slice_labels(dimension: str, runs: Sequence[RunRecord]) -> list[str]:
    from plugin.ppo_utils.mismatch_metrics import SLICES

    present = {key for run in runs for record in run.steps[-SLICE_STEPS:] for key in record}
    labels = [label.split("/")[1] for label in SLICES if label.startswith(dimension + "/")]
    return [label for label in labels if f"mismatch/{dimension}/{label}/k3" in present]


def _slice_mean(run: RunRecord, prefix: str) -> float | None:
    """Mean k3 of a slice over the last steps, weighted by its tokens."""
    total = weight = 0.0
    for record in run.steps[-SLICE_STEPS:]:
        k3, tokens = (_number(record.get(f"{prefix}/{name}")) for name in ("k3", "tokens"))
        if k3 is not None and tokens:
            total, weight = total + k3 * tokens, weight + tokens
    return total / weight if weight else None


def _tiles(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    if len(runs) > 1:
        return [
            {"label": f"last reward · {name}", "value": _last_mean(run, "reward")}
            for name, run in zip(_distinct_names(runs), runs, strict=True)
        ][:8]
    run = runs[0]
    rewards = [value for value in _values(run, ("reward",)) if value is not None]
    return [
        {"label": "steps", "value": str(len(run.steps))},
        {"label": "reward, last steps", "value": _last_mean(run, "reward")},
        {"label": "reward, first step", "value": rewards[0] if rewards else None},
        {"label": "mismatch KL, last steps", "value": _last_mean(run, "mismatch_kl")},
        {"label": "ESS / N, last steps", "value": _last_mean(run, "mismatch/ess_share")},
        {"label": "staleness, last steps", "value": _last_mean(run, "staleness")},
        {"label": "tokens / s, last steps", "value": _last_mean(run, "tokens_per_second")},
    ]


def _last_mean(run: RunRecord, key: str) -> float | None:
    known = [value for value in _values(run, (key,))[-5:] if value is not None]
    return sum(known) / len(known) if known else None


def _finding(item: dict[str, Any], run_name: str) -> dict[str, str]:
    texts = {
        name: str(item.get(name, ""))
        for name in ("title", "severity", "evidence", "likely_cause", "what_to_try")
    }
    first, last = item.get("step"), item.get("last_step", item.get("step"))
    when = f"step {first}" if first == last else f"steps {first} to {last}"
    return texts | {"where": f"{run_name}, {when}"}


def _settings(runs: Sequence[RunRecord], *, different_only: bool) -> list[list[str]]:
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    rows = [[key, *(_setting(run.config.get(key, "")) for run in runs)] for key in keys]
    return [row for row in rows if not different_only or len(set(row[1:])) > 1]


def _setting(value: Any) -> str:
    return "none" if value is None else str(value)


def _distinct_names(runs: Sequence[RunRecord]) -> list[str]:
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(names)]


def _color(index: int) -> str:
    return f"c{index % 8}"
