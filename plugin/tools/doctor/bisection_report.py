"""The table and the page of a bisection."""

from __future__ import annotations

from collections.abc import Sequence
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
    headers = ["layer", *(f"{'MLP' if p == 'mlp' else p}, local" for p in parts)]
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
    charts = [_local_chart(number, one, verdict) for number, one in enumerate(passes)]
    charts.append(_accumulated_chart(passes, verdict))
    data = {
        "finding": {
            "title": verdict.text[0].upper() + verdict.text[1:],
            "severity": "error" if verdict.fault else "info",
            "cause": verdict.cause,
        },
        "charts": [{**chart, "keyColors": True} for chart in charts],
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
    subtitle = f"{len(passes[0].accumulated)} layers; {names}"
    return page("Where does the mismatch come from?", subtitle, data, "bisect.js")


def _local_chart(number: int, bisection: Bisection, verdict: Verdict) -> dict[str, Any]:
    lines = []
    for color, part in enumerate(_PARTS):
        found = [p for p in bisection.parts if p.part == part]
        if found:
            label = "MLP" if part == "mlp" else part
            lines.append(
                series(
                    color,
                    label,
                    [p.layer for p in found],
                    [max(p.local, _SHOWN_ZERO) for p in found],
                    dots=True,
                    kind=label,
                )
            )
    limits = {p.limit for p in bisection.parts if p.layer is not None}
    return {
        "id": f"local-{number}",
        "title": f"Local difference, {bisection.name}",
        "note": "Each layer on the engine's own input: a fault stands out in its layer. Dotted: "
        "what rounding explains; 0 is drawn at 1e-8.",
        "log": True,
        "xLabels": [str(layer) for layer in range(len(bisection.accumulated))],
        "marks": [{"y": limit} for limit in sorted(limits)],
        "points": _points(verdict),
        "series": lines,
    }


def _accumulated_chart(passes: Sequence[Bisection], verdict: Verdict) -> dict[str, Any]:
    return {
        "id": "accumulated",
        "title": "Accumulated difference of the hidden states",
        "note": "Engine and trainer each on their own: errors carry over to all later layers.",
        "log": True,
        "xLabels": [str(layer) for layer in range(len(passes[0].accumulated))],
        "points": _points(verdict),
        "series": [
            series(
                number,
                bisection.name,
                list(range(len(bisection.accumulated))),
                bisection.accumulated,
                dots=True,
                kind=bisection.name,
            )
            for number, bisection in enumerate(passes)
        ],
    }


def _points(verdict: Verdict) -> list[dict[str, Any]]:
    """The layer that the verdict points at, as a vertical line."""
    if not verdict.fault or verdict.layer is None:
        return []
    part = {"mlp": "MLP"}.get(verdict.part or "", verdict.part)
    return [{"x": verdict.layer, "label": f"layer {verdict.layer}: {part}"}]
