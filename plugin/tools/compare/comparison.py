"""One pass over a dump: replays, sweeps and detectors together, in bounded memory.

The result is printed as a table, or shown as a page (`megatron-tis compare --html`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plugin.config import JobConfig
from plugin.observe.console import text_table
from plugin.observe.detectors import MismatchDetectors
from plugin.observe.html_page import located, page, series
from plugin.observe.run_record import group_findings
from plugin.tools.compare.dump_columns import DumpBlock
from plugin.tools.compare.dump_reading import Dump
from plugin.tools.compare.replay import Method, MethodStatistics, replay_block
from plugin.tools.compare.sweeps import Sweep

#: (key of a summary, heading of the table)
COLUMNS = (
    ("kept_share", "kept"),
    ("clipped_share", "clipped"),
    ("weight_mean", "weight mean"),
    ("weight_max", "weight max"),
    ("ess_share", "ESS/N"),
    ("weight_variance", "weight var"),
    ("relative_bias", "bias"),
    ("relative_bias_error", "± 95 %"),
    ("bias_bound", "bias bound"),
    ("positive_removed", "A>0 removed"),
    ("negative_removed", "A<0 removed"),
)


@dataclass
class Comparison:
    """What `megatron-tis compare` prints, draws and writes as JSON."""

    samples: int
    tokens: int
    methods: list[MethodStatistics]
    sweeps: list[Sweep]
    findings: list[dict[str, Any]]
    problems: list[str]
    target_ess: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "tokens": self.tokens,
            "methods": [{"name": entry.method.name, **entry.summary()} for entry in self.methods],
            "sweeps": [
                {
                    "flag": sweep.flag,
                    "method": sweep.method,
                    "points": sweep.points(),
                    "recommendation": sweep.recommendation(self.target_ess),
                }
                for sweep in self.sweeps
            ],
            "target_ess": self.target_ess,
            "findings": self.findings,
            "problems": self.problems,
        }


def compare(
    dump: Dump,
    methods: Sequence[Method],
    sweeps: Sequence[Sweep] = (),
    *,
    target_ess: float = 0.9,
    custom_detector_path: str | None = None,
    progress: Callable[[int], Any] = lambda size: None,
) -> Comparison:
    """Read the dump once; `progress` is called with the input bytes of every block."""
    statistics = [MethodStatistics(method) for method in methods]
    everything = statistics + [entry for sweep in sweeps for entry in sweep.statistics]
    detection = DumpDetection(custom_detector_path)
    samples = tokens = 0
    for block, size in dump.blocks():
        replay_block(block, everything)
        detection.add(block)
        samples, tokens = samples + len(block.lengths), tokens + int(block.mask.sum())
        progress(size)
    return Comparison(
        samples,
        tokens,
        statistics,
        list(sweeps),
        detection.findings(),
        dump.problems,
        target_ess,
    )


class DumpDetection:
    """Runs the detectors over a dump, block after block in order."""

    def __init__(self, custom_path: str | None = None, config: JobConfig | None = None) -> None:
        self._detectors = MismatchDetectors(custom_path=custom_path, config=config)
        self._found: list[dict[str, Any]] = []

    def add(self, block: DumpBlock) -> None:
        """Check every step of a block; one that is spread over blocks is checked once for each."""
        columns = block.batch_columns()
        for step in np.unique(block.step).tolist():
            rows = np.flatnonzero(block.step == step)
            found = self._detectors.check(
                {name: [values[i] for i in rows] for name, values in columns.items()},
                step=step,
                trainer_version=block.trainer_version[rows].tolist(),
            )
            self._found += ({"step": step, **finding.as_dict()} for finding in found)

    def findings(self) -> list[dict[str, Any]]:
        """The findings so far, grouped by `group_findings`."""
        return group_findings(self._found)


def comparison_text(comparison: Comparison) -> str:
    """The comparison as aligned columns."""
    rows = [["method", *(heading for _, heading in COLUMNS)]]
    for entry in comparison.methods:
        summary = entry.summary()
        rows.append([entry.method.name, *(_number(summary[key]) for key, _ in COLUMNS)])
    lines = text_table(rows)
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def recommendation_text(recommendation: dict[str, Any], target: float) -> str:
    """One sentence per sweep, and one line per length bin for sequence-level thresholds."""
    option = "--" + recommendation["flag"].replace("_", "-")
    lines = [f"{option} on {recommendation['method']}: {_advice(recommendation, option, target)}"]
    for length, best in recommendation.get("by_length", {}).items():
        lines.append(f"  responses of {length} tokens: {_advice(best, option, target)}")
    return "\n".join(lines)


def _advice(best: dict[str, Any], option: str, target: float) -> str:
    found = f"ESS/N {best['ess_share']:.3f}, bias bound {best['bias_bound']:.3f}"
    if best["reached"]:
        return f"take {option} {best['value']:g} ({found})"
    return f"no value reaches ESS/N {target:g}; the closest is {option} {best['value']:g} ({found})"


def _number(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.4f}" if 1e-4 <= abs(value) < 1e4 else f"{value:.1e}"


def comparison_html(result: dict[str, Any]) -> str:
    """One page from `Comparison.as_dict()`."""
    sweeps = result["sweeps"]
    charts = [_ess_against_bias(sweeps), *map(_threshold_chart, sweeps)] if sweeps else []
    data = {
        "headers": ["method", *(heading for _, heading in COLUMNS)],
        "rows": [[row["name"], *(row[key] for key, _ in COLUMNS)] for row in result["methods"]],
        "charts": [{**chart, "keyColors": True} for chart in charts],
        "recommendations": [
            recommendation_text(sweep["recommendation"], result["target_ess"]) for sweep in sweeps
        ],
        "findings": [located(finding) for finding in result["findings"]],
        "problems": result["problems"],
        "footer": "bias: mean of g − g* over mean |g*|, g* = A·exp(cur − rollout), with a 95 % "
        "interval from sequences; bias bound: mean |g − g*| over mean |g*|; A>0 removed: share of "
        "positive advantage without gradient",
    }
    subtitle = f"{result['tokens']:,} tokens in {result['samples']:,} samples"
    return page("Losses and corrections compared", subtitle, data, "compare.js")


def _ess_against_bias(sweeps: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": "ess_against_bias",
        "title": "ESS against bias bound",
        "note": "Every point is one threshold; up and to the left is better.",
        "xName": "bias bound",
        "series": [
            _line(i, _title(sweep), *(_column(sweep, key) for key in ("bias_bound", "ess_share")))
            for i, sweep in enumerate(sweeps)
        ],
    }


def _threshold_chart(sweep: dict[str, Any]) -> dict[str, Any]:
    points = sweep["points"]
    places = list(range(len(points)))
    shown = {"ESS/N": "ess_share", "bias bound": "bias_bound", "kept": "kept_share"}
    lines = [
        _line(i, label, places, _column(sweep, key)) for i, (label, key) in enumerate(shown.items())
    ]
    for length in [row["length"] for row in points[0].get("by_length", [])]:
        values = [
            next((row["ess_share"] for row in point["by_length"] if row["length"] == length), None)
            for point in points
        ]
        lines.append(_line(len(lines), f"ESS/N, {length} tokens", places, values, dash="4 3"))
    return {
        "id": f"{sweep['flag']}-{sweep['method']}".replace(" ", ""),
        "title": _title(sweep),
        "note": "Over the values of the threshold.",
        "xLabels": [f"{point['value']:g}" for point in points],
        "series": lines,
    }


def _title(sweep: dict[str, Any]) -> str:
    return f"{sweep['flag'].replace('_', '-')} · {sweep['method']}"


def _column(sweep: dict[str, Any], key: str) -> list[Any]:
    return [point[key] for point in sweep["points"]]


def _line(index: int, label: str, x: list[Any], y: list[Any], **more: Any) -> dict[str, Any]:
    return series(index, label, x, y, kind=label, dots=True, **more)
