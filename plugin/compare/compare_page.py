"""The page of `megatron-tis compare --html`: table, ESS against bias, sweep curves, findings."""

from __future__ import annotations

from typing import Any

from plugin.compare.comparison import COLUMNS, recommendation_text
from plugin.observe.html_page import page


def comparison_html(result: dict[str, Any]) -> str:
    """One page from `Comparison.as_dict()`."""
    data = {
        "headers": ["method", *(heading for _, heading in COLUMNS)],
        "rows": [[row["name"], *(row[key] for key, _ in COLUMNS)] for row in result["methods"]],
        "charts": _charts(result["sweeps"]),
        "recommendations": [
            recommendation_text(sweep["recommendation"], result["target_ess"])
            for sweep in result["sweeps"]
        ],
        "findings": [
            finding | {"where": f"steps {finding['step']} to {finding['last_step']}"}
            for finding in result["findings"]
        ],
        "problems": result["problems"],
        "footer": "bias: mean of g − g* over mean |g*|, g* = A·exp(cur − rollout), with a 95 % interval from sequences; "
        "bias bound: mean |g − g*| over mean |g*|; A>0 removed: share of positive advantage without gradient",
    }
    subtitle = f"{result['tokens']:,} tokens in {result['samples']:,} samples"
    return page("Losses and corrections compared", subtitle, data, ["compare.js"])


def _charts(sweeps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not sweeps:
        return []
    names = [f"{sweep['flag'].replace('_', '-')} · {sweep['method']}" for sweep in sweeps]
    against = {
        "id": "ess_against_bias",
        "title": "ESS against bias bound",
        "note": "Every point is one threshold; up and to the left is better.",
        "keyColors": True,
        "xName": "bias bound",
        "series": [
            _series(
                i,
                names[i],
                [p["bias_bound"] for p in s["points"]],
                [p["ess_share"] for p in s["points"]],
            )
            for i, s in enumerate(sweeps)
        ],
    }
    return [
        against,
        *(_threshold_chart(sweep, name) for sweep, name in zip(sweeps, names, strict=True)),
    ]


def _threshold_chart(sweep: dict[str, Any], name: str) -> dict[str, Any]:
    points = sweep["points"]
    places = list(range(len(points)))
    series = [
        _series(0, "ESS/N", places, [point["ess_share"] for point in points]),
        _series(1, "bias bound", places, [point["bias_bound"] for point in points]),
        _series(2, "kept", places, [point["kept_share"] for point in points]),
    ]
    for number, length in enumerate(row["length"] for row in points[0].get("by_length", [])):
        values = [
            next((row["ess_share"] for row in point["by_length"] if row["length"] == length), None)
            for point in points
        ]
        series.append(
            _series(3 + number, f"ESS/N, {length} tokens", places, values) | {"dash": "4 3"}
        )
    return {
        "id": f"{sweep['flag']}-{sweep['method']}".replace(" ", ""),
        "title": name,
        "note": "Over the values of the threshold.",
        "keyColors": True,
        "xLabels": [f"{point['value']:g}" for point in points],
        "series": series,
    }


def _series(index: int, label: str, x: list[Any], y: list[Any]) -> dict[str, Any]:
    return {
        "run": index,
        "label": label,
        "kind": label,
        "color": f"c{index % 8}",
        "dots": True,
        "x": x,
        "y": y,
    }
