"""Which runs the suite consists of, in the order in which they are made, and the file that holds what is done."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.evidence.simulation import Cell
from plugin.compare.replay import method_pairs

DATA = Path(__file__).with_name("data.jsonl")
SEEDS = 5
STALENESS = (0, 16, 64, 4, 1)
#: (engine, updates per rollout, staleness) besides float32 and one update.
FURTHER = [
    *(("bfloat16", 1, staleness) for staleness in (0, 4)),
    *(("int8", 1, staleness) for staleness in (0, 4, 16)),
    *(("float32", 4, staleness) for staleness in (0, 4, 16)),
]


def cells() -> Iterator[Cell]:
    """Seed by seed, so that an interrupted suite has all methods equally often; no method is left out."""
    for seed in range(SEEDS):
        for staleness in STALENESS:
            for loss, hook in method_pairs():
                yield Cell(loss, hook, staleness, "float32", 1, seed)
    for seed in range(SEEDS):
        for engine, updates, staleness in FURTHER:
            for loss, hook in method_pairs():
                yield Cell(loss, hook, staleness, engine, updates, seed)


def results(path: Path = DATA) -> list[dict[str, Any]]:
    """What has been measured so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def open_cells(path: Path = DATA) -> list[Cell]:
    """The runs that are still to be made, in order."""
    names = Cell.__dataclass_fields__
    done = {Cell(**{name: row[name] for name in names}) for row in results(path)}
    return [cell for cell in cells() if cell not in done]


def record(row: dict[str, Any], path: Path = DATA) -> None:
    """Append a finished run."""
    rounded = {k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}
    with path.open("a") as file:
        file.write(json.dumps(rounded) + "\n")
