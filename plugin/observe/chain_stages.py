"""What each stage of a chain of corrections did to the tokens of a step, as a small table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from plugin.observe.text_table import aligned

_STAGE = re.compile(r"chain/(\d+)_(.+)/(removed|weighted|weight)")


def chain_rows(step: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per stage of a step's metrics, in order; none where there is no chain."""
    rows: dict[int, dict[str, Any]] = {}
    for name, value in step.items():
        if (found := _STAGE.fullmatch(name)) is not None:
            number = int(found[1])
            rows.setdefault(number, {"stage": number, "correction": found[2]})[found[3]] = value
    return [rows[number] for number in sorted(rows)]


def chain_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rows as aligned columns: shares of all tokens, and the mean weight after the stage."""
    table = [["stage", "correction", "removed", "weighted", "mean weight so far"]]
    for row in rows:
        shares = [f"{float(row.get(key, 0.0)):.2%}" for key in ("removed", "weighted")]
        weight = f"{float(row.get('weight', 0.0)):.4f}"
        table.append([str(row["stage"]), str(row["correction"]), *shares, weight])
    return [f"  {line}" for line in aligned(table)]
