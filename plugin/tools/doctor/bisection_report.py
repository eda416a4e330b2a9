"""The table and the page of a bisection."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from plugin.observe.console import text_table
from plugin.observe.html_page import page, series
from plugin.tools.doctor.bisection import Bisection, PartDifference, Verdict

_PARTS = ("attention", "router", "mlp", "layer")
#: Where a logarithmic axis shows 0.
_SHOWN_ZERO = 1e-8


def as_text(passes: Sequence[Bisection], verdict: Verdict) -> str:
    """One table per pair of dtypes, and the verdict."""
    blocks = []
    for bisection in passes:
        headers, rows = table(bisection)
        lines = text_table([headers, *(["" if c is None else c for c in row] for row in rows)])
        off = bisection.log_prob_difference
        summary = "" if off is None else f"; log-probs differ by {off:.1e} on average"
        blocks.append("\n".join([bisection.name + summary, *lines]))
    word = "FOUND" if verdict.fault else "ok"
    blocks.append(f"{word}: {verdict.text}\n  likely: {verdict.cause}")
    return "\n\n".join(blocks)


def table(bisection: Bisection) -> tuple[list[str], list[list[str | None]]]:
    """Headers and rows: layer, local differences by part, accumulated difference.

    A part that differs by more than rounding is marked with `!`.
    """
    parts = [part for part in _PARTS if any(p.part == part for p in bisection.parts)]
    headers = ["layer", *(f"{_label(p)}, local" for p in parts)]
    if "router" in parts:
        headers.append("other experts")
    headers.append("accumulated")
    rows: list[list[str | None]] = []
    blank: list[str | None] = [None] * (len(headers) - 2)
    edges = bisection.of_layer(None)
    if "embedding" in edges:
        rows.append(["embedding", *blank, _marked(edges["embedding"])])
    for layer, accumulated in enumerate(bisection.accumulated):
        found = bisection.of_layer(layer)
        row: list[str | None] = [str(layer)]
        row += [_marked(found[part]) if part in found else None for part in parts]
        if "router" in parts:
            row.append(f"{found['router'].changed:.1%}" if "router" in found else None)
        row.append(f"{accumulated:.1e}" + (" <- jumps" if layer == bisection.jump else ""))
        rows.append(row)
    if "head" in edges:
        rows.append(["LM head (log-probs)", *blank, _marked(edges["head"])])
    return headers, rows


def _marked(part: PartDifference) -> str:
    return f"{part.local:.1e}" + (" !" if part.is_fault else "")


def as_page(passes: Sequence[Bisection], verdict: Verdict) -> str:
    """The page: verdict, local and accumulated differences by layer, the tables."""
    layers = len(passes[0].accumulated)
    shared: dict[str, Any] = {
        "log": True,
        "keyColors": True,
        "xLabels": [str(layer) for layer in range(layers)],
        "points": [],
    }
    if verdict.fault and verdict.layer is not None:
        label = f"layer {verdict.layer}: {_label(verdict.part)}"
        shared["points"] = [{"x": verdict.layer, "label": label}]
    accumulated = {
        "id": "accumulated",
        "title": "Accumulated difference of the hidden states",
        "note": "Engine and trainer each on their own: errors carry over to all later layers.",
        "series": [
            _line(number, one.name, range(layers), one.accumulated)
            for number, one in enumerate(passes)
        ],
    }
    charts = [*(_local_chart(number, one) for number, one in enumerate(passes)), accumulated]
    data = {
        "finding": {
            "title": verdict.text[0].upper() + verdict.text[1:],
            "severity": "error" if verdict.fault else "info",
            "cause": verdict.cause,
        },
        "charts": [shared | chart for chart in charts],
        "tables": [
            {"title": bisection.name, "headers": headers, "rows": rows}
            for bisection, (headers, rows) in ((b, table(b)) for b in passes)
        ],
        "problems": [],
        "footer": "local: |trainer − engine| / |engine| of what a part adds to the residual "
        "stream, when the trainer's part gets the engine's input; accumulated: the same of a "
        "layer's output, when each runs on its own; ! = more than rounding explains",
    }
    names = "; ".join(bisection.name for bisection in passes)
    return page(
        "Where does the mismatch come from?", f"{layers} layers; {names}", data, "bisect.js"
    )


def _local_chart(number: int, bisection: Bisection) -> dict[str, Any]:
    lines = []
    for color, part in enumerate(_PARTS):
        found = [p for p in bisection.parts if p.part == part]
        if found:
            values = [max(p.local, _SHOWN_ZERO) for p in found]
            lines.append(_line(color, _label(part), [p.layer for p in found], values))
    limits = {p.limit for p in bisection.parts if p.layer is not None}
    return {
        "id": f"local-{number}",
        "title": f"Local difference, {bisection.name}",
        "note": "Each layer on the engine's own input: a fault stands out in its layer. Dotted: "
        "what rounding explains; 0 is drawn at 1e-8.",
        "marks": [{"y": limit} for limit in sorted(limits)],
        "series": lines,
    }


def _line(color: int, label: str, x: Iterable[Any], y: list[float]) -> dict[str, Any]:
    return series(color, label, list(x), y, dots=True, kind=label)


def _label(part: str | None) -> str:
    return "MLP" if part == "mlp" else str(part)
