"""The page of `megatron-tis compare --html`: table, ESS against bias, sweep curves, findings."""

from __future__ import annotations

from typing import Any

from plugin.observe.html_page import located, page, series
from plugin.tools.compare.comparison import COLUMNS, recommendation_text


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
