"""What a search found, as text for a terminal and as plain values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from plugin.observe.console import text_table
from plugin.tools.plan.layouts import layout_flags
from plugin.tools.plan.search import SearchResult


def search_json(result: SearchResult) -> dict[str, Any]:
    """Planned layouts in their order, each with its reason, and those that were left out."""
    return {
        "layouts": [asdict(candidate) | {"why": candidate.why} for candidate in result.planned],
        "left_out": [asdict(layout) for layout in result.left_out],
    }


def search_text(result: SearchResult, limit: int) -> list[str]:
    """Lines for a terminal: the table, the fastest layout's flags, what was left out."""
    rows = [["layout", "fits", "peak", "step", "bubble", "microbatches", "why"]]
    for found in result.planned:
        numbers = ["-"] * 4
        if found.problem is None:
            numbers = [
                f"{found.peak_bytes / 2**30:.1f} GiB",
                f"{found.step_seconds:.2f} s",
                f"{found.bubble:.1%}",
                str(found.microbatches),
            ]
        rows.append([found.layout, "yes" if found.fits else "no", *numbers, ""])
    # The reason is long and comes last, so it is not aligned.
    lines = [
        f"{line}  {why}"
        for line, why in zip(
            text_table([row[:-1] for row in rows]),
            ["why", *(found.why for found in result.planned)],
            strict=True,
        )
    ]
    if result.planned and result.planned[0].fits:
        best = result.planned[0]
        lines += ["", f"fastest that fits: {layout_flags(best.settings) or 'no parallel flags'}"]
    return lines + _left_out(result, limit)


def _left_out(result: SearchResult, limit: int) -> list[str]:
    too_large = sum(layout.cause == "memory" for layout in result.left_out)
    slower = len(result.left_out) - too_large
    lines = []
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
    return ["", *lines] if lines else []
