"""Which runs the suite consists of, in the order in which they are made, and the file that holds what is done.

Not every combination of the axes is a cell. The main grid is staleness, with a float32 engine and one update per
rollout; every other axis departs from it at the values of staleness listed here, first with one arm or more of every
kind, then with all. Which runs are made was decided before they were; none is left out by its result.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.evidence.arms import CORE, Arm, arms, equals_ppo
from benchmarks.evidence.engine import Setting

DATA = Path(__file__).with_name("data.jsonl")
STALENESS = (0, 1, 4, 16, 64)
_REPLAY = (False, True)
#: In the order in which they are run; the first ones with all arms at once.
FIRST = (Setting(16), Setting(64), Setting(4), Setting(0))
NEXT = (
    Setting(4, updates=4),
    Setting(1),
    Setting(0, "int8"),
    *(Setting(4, top_p=0.9, mask_replay=replay) for replay in _REPLAY),
    *(Setting(4, "int8", mixture=True, route_replay=replay) for replay in _REPLAY),
    Setting(16, "int8"),
    Setting(16, updates=4),
    *(Setting(0, top_p=0.9, mask_replay=replay) for replay in _REPLAY),
    Setting(0, "bfloat16"),
    *(Setting(0, "int8", mixture=True, route_replay=replay) for replay in _REPLAY),
    Setting(4, "int8"),
    Setting(0, updates=4),
    Setting(4, "bfloat16"),
)
SETTINGS = (*FIRST, *NEXT)
#: Run with all arms after the adviser's rule had been written from the settings above, and only to check it.
CHECK = (
    Setting(2),
    Setting(8),
    Setting(32),
    Setting(8, "int8"),
    Setting(8, top_p=0.9),
    Setting(1, updates=2),
    Setting(0, "int8", updates=2),
    Setting(2, updates=4),
    Setting(8, updates=4),
    Setting(32, updates=4),
    Setting(2, "int8", mixture=True),
    Setting(0, "bfloat16", mixture=True),
)
Row = dict[str, Any]


def runs() -> Iterator[tuple[Arm, Setting]]:
    """All arms of the first settings, the core of the next ones, the other arms of these; the same of those that check."""
    others = [arm for arm in arms() if arm not in CORE]
    parts = ((FIRST, arms()), (NEXT, CORE), (NEXT, others), (CHECK, CORE), (CHECK, others))
    for settings, chosen in parts:
        for setting in settings:
            yield from ((arm, setting) for arm in chosen if not equals_ppo(arm, setting))


def setting_of(row: Row) -> Setting:
    return Setting(**{field.name: row[field.name] for field in fields(Setting)})


def read_rows(path: Path) -> list[Row]:
    """The lines of a file of runs; none if it is not there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def results(path: Path = DATA) -> list[Row]:
    """What has been measured so far, with a row of its own for every arm whose run is that of `ppo`."""
    rows = read_rows(path)
    twins = [
        {**row, "arm": arm.name}
        for row in rows
        if row["arm"] == "ppo"
        for arm in arms()
        if equals_ppo(arm, setting_of(row))
    ]
    return rows + twins


def open_runs(path: Path = DATA) -> list[tuple[Arm, Setting]]:
    """The runs that are still to be made, in order."""
    done = {(row["arm"], setting_of(row)) for row in results(path)}
    return [(arm, setting) for arm, setting in runs() if (arm.name, setting) not in done]


def shown_settings(rows: list[Row]) -> list[Setting]:
    """The settings, in order, in which every arm of the core has been measured: only these are shown."""
    done = {(row["arm"], setting_of(row)) for row in rows}
    return [s for s in (*SETTINGS, *CHECK) if all((arm.name, s) in done for arm in CORE)]


def record(row: Row, path: Path = DATA) -> None:
    """Append a finished run."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
