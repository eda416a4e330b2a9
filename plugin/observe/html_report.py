"""From run directories to one HTML report: which metrics are drawn where."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plugin.observe.html_page import located, page, series, write_page
from plugin.observe.learning import run_findings
from plugin.observe.run_record import RunRecord, read_run, read_samples

#: A drawn line has at most twice this many points: the lowest and the highest of every stretch.
MAX_STRETCHES = 600
#: Samples in a report, of all runs together, and characters of each text.
MAX_SAMPLES, MAX_TEXT = 300, 3000
#: The slices show the mean over this many last steps.
SLICE_STEPS = 20
_DASHES = ("", "5 3", "2 3")


@dataclass(frozen=True)
class Panel:
    """One chart.

    lines: label -> metrics, of which the first that a run has recorded is drawn
    bands: (low key, high key, opacity); mark: a horizontal reference line
    floor, ceiling: values that the axis always shows
    optional: left out without data
    """

    id: str
    title: str
    note: str
    lines: dict[str, tuple[str, ...]]
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
        {"reward": ("reward",)},
    ),
    Panel(
        "mismatch_kl",
        "Mismatch KL",
        "KL of the rollout policy from the trained one, per token (k3). Noise of the engine stays "
        "flat; growth is a warning.",
        {"current policy": ("mismatch_kl",), "start of the step": ("mismatch/k3",)},
        log=True,
        missing=_NEEDS_ROLLOUT,
    ),
    Panel(
        "teacher_kl",
        "Distance from the teacher",
        "Reverse KL per token: its estimate by the sampled tokens, and over the likeliest ids.",
        {"sampled tokens": ("teacher_kl",), "likeliest ids": ("distill_kl",)},
        optional=True,
    ),
    Panel(
        "ratio_percentiles",
        "Ratio percentiles",
        "π_train / π_rollout before any correction: median, 25–75 %, 5–95 % and 1–99 %.",
        {"median": ("mismatch/ratio_p50",)},
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
        "ESS / N of the token weights: 1 means every token counts, 0.5 that half the batch is "
        "wasted.",
        {
            "after correction": ("mismatch/weight_ess_share",),
            "before correction": ("mismatch/ess_share",),
        },
        ceiling=1.0,
        missing=_NEEDS_ROLLOUT,
    ),
    Panel(
        "clipped",
        "Clipped fraction",
        "Tokens whose weight or policy ratio was bounded.",
        {
            "policy loss": ("pg_clipfrac",),
            "weight, high": ("mismatch/clipped_high_share", "tis_clipfrac"),
            "weight, low": ("mismatch/clipped_low_share",),
        },
        floor=0.0,
    ),
    Panel(
        "masked",
        "Masked fraction",
        "Tokens that a correction dropped, by the side on which their ratio left the band.",
        {
            "all": ("is_masked",),
            "too high": ("is_masked_high", "mismatch/masked_high_share"),
            "too low": ("is_masked_low", "mismatch/masked_low_share"),
        },
        floor=0.0,
        missing="Not recorded: no correction that masks is in use",
    ),
    Panel(
        "rollout_kl",
        "Rollout KL",
        "The KL term between the current and the rollout policy, as the loss sees it.",
        {"rollout KL": ("rollout_kl",)},
        log=True,
        missing="Not recorded: --use-rollout-kl-loss is off",
    ),
    Panel(
        "grad_norm",
        "Gradient norm",
        "Of the whole model, before clipping. Spikes that follow a rise of the mismatch are "
        "off-policy noise.",
        {"gradient norm": ("grad_norm",)},
        log=True,
    ),
    Panel(
        "staleness",
        "Weight staleness",
        "How many weight versions the rollouts were behind the trainer.",
        {"mean": ("staleness",), "oldest": ("staleness_max",)},
        floor=0.0,
    ),
    Panel(
        "throughput",
        "Throughput",
        "Tokens per second of wall clock.",
        {"tokens/s": ("tokens_per_second",)},
        floor=0.0,
    ),
    Panel("loss", "Loss", "The whole loss, all terms.", {"loss": ("loss",)}),
    Panel(
        "entropy",
        "Entropy",
        "Mean entropy of the policy at the sampled tokens.",
        {"entropy": ("entropy_loss",)},
        optional=True,
    ),
    Panel(
        "extremes",
        "Largest and smallest ratio",
        "True extremes over every rank, before correction.",
        {"largest": ("mismatch/ratio_max",), "smallest": ("mismatch/ratio_min",)},
        log=True,
        mark=1.0,
        optional=True,
    ),
    Panel(
        "response_length",
        "Response length",
        "Mean number of response tokens.",
        {"tokens": ("response_length",)},
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
#: Not drawn: numbers that only count, and the slices and totals behind the panels.
_BOOKKEEPING = (
    *(
        "step",
        "rollout",
        "epoch",
        "weight_version",
        "lr",
        "turns",
        "skipped",
        "samples_per_trajectory",
    ),
    *("engine_restarts", "trainer_restarts", "padding_microbatch_share"),
)
_BOOKKEEPING_PREFIXES = ("mismatch/", "seconds", "prompts_", "dropped_", "groups_", "num_")
#: Settings that differ between any two runs.
_OF_ONE_RUN = ("run_dir", "name")
#: The numbers above the charts.
TILES = {
    "reward": "reward",
    "mismatch KL": "mismatch_kl",
    "ESS / N": "mismatch/ess_share",
    "staleness": "staleness",
    "tokens / s": "tokens_per_second",
}


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
            *(chart for panel in PANELS[:1] if (chart := _chart(panel, runs, names))),
            *_evaluation_charts(runs, names),
            *(chart for panel in PANELS[1:] if (chart := _chart(panel, runs, names))),
        ],
        "other": [chart for panel in _other_panels(runs) if (chart := _chart(panel, runs, names))],
        "slices": [chart for part in _SLICES if (chart := _slice_chart(*part, runs, names))],
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


def _other_panels(runs: Sequence[RunRecord]) -> list[Panel]:
    """One panel for every further metric, whoever recorded it: a hook, a loss, the user's code."""
    drawn = {name for panel in PANELS for names in panel.lines.values() for name in names}
    drawn |= {name for panel in PANELS for low, high, _ in panel.bands for name in (low, high)}
    found = {name for run in runs for record in run.steps for name in record}
    return [
        Panel(f"metric/{name}", name, "", {name: (name,)}, optional=True)
        for name in sorted(found - drawn - {*_BOOKKEEPING})
        if not name.startswith(_BOOKKEEPING_PREFIXES)
    ]


def _evaluation_charts(runs: Sequence[RunRecord], names: list[str]) -> list[dict[str, Any]]:
    """One chart per set: mean with its interval, and pass@k of the smallest and the largest k."""
    found = {name for run in runs for record in run.evaluations for name in record}
    sets = sorted({name.split("/")[1] for name in found if name.startswith("eval/")})
    evaluated = [replace(run, steps=run.evaluations) for run in runs]
    charts = []
    for name in sets:
        prefix = f"eval/{name}/"
        passes = [key.removeprefix(prefix) for key in found if key.startswith(f"{prefix}pass@")]
        ks = sorted({int(key.split("/")[0].removeprefix("pass@")) for key in passes})
        lines = ["mean", *dict.fromkeys(f"pass@{k}" for k in (*ks[:1], *ks[-1:]))]
        panel = Panel(
            prefix,
            f"Evaluation on {name}",
            "Mean reward and pass@k on prompts that are not trained on; the band is the 95 % "
            "interval of the mean.",
            {line: (prefix + line,) for line in lines},
            bands=((f"{prefix}mean/ci_low", f"{prefix}mean/ci_high", 0.18),),
        )
        chart = _chart(panel, evaluated, names)
        if chart is not None:
            charts.append(chart)
    return charts


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


def _chart(panel: Panel, runs: Sequence[RunRecord], names: list[str]) -> dict[str, Any] | None:
    lines, bands = [], []
    alone = len(runs) == 1
    for i, run in enumerate(runs):
        steps = [record["step"] for record in run.steps]
        for number, (name, keys) in enumerate(panel.lines.items()):
            x, y = thinned(steps, _values(run, *keys))
            label = name if alone else f"{names[i]} {name}"
            kind = name if len(panel.lines) > 1 else ""
            # One run: a color per line. Several: a color per run, the lines differ by their dashes.
            style = {"color": f"c{number}"} if alone else {"dash": _DASHES[number]}
            lines.append(series(i, label, x, y, kind=kind, **style))
        stride = max(1, len(steps) // MAX_STRETCHES)
        for low, high, opacity in panel.bands:
            points = list(zip(steps, _values(run, low), _values(run, high), strict=True))[::stride]
            known = [point for point in points if None not in point]
            bands.append(
                {"run": i, "color": f"c{i % 8}", "opacity": opacity / math.sqrt(len(runs))}
                | {key: [p[j] for p in known] for j, key in enumerate(("x", "low", "high"))}
            )
    if panel.optional and not any(value is not None for line in lines for value in line["y"]):
        return None
    chart = {"id": panel.id, "title": panel.title, "note": panel.note, "missing": panel.missing}
    return chart | {
        "log": panel.log,
        "series": lines,
        "bands": bands,
        "keyColors": alone,
        "floor": panel.floor,
        "ceiling": panel.ceiling,
        "marks": [] if panel.mark is None else [{"y": panel.mark}],
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


def _slice_chart(
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
