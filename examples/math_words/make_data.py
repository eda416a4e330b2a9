"""Arithmetic in words: problems with worked answers, in the format of GSM8K.

    python examples/math_words/make_data.py --output runs/math_words

Writes `train.jsonl` and `eval.jsonl` with {"question": ..., "answer": "3+4=7\\n7-2=5\\n#### 5"} per line. The two contain
different calculations, not just different words: whether one is held out depends only on its numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivy", "Jo", "Kim", "Leo")
ITEMS = ("apples", "books", "coins", "eggs", "figs", "keys", "nuts", "pens", "plums", "shells")
GAINS = ("buys", "finds", "gets", "wins")
LOSSES = ("loses", "sells", "drops", "gives away")
#: One calculation in eight is held out.
HELD_OUT_SHARE = 8


@dataclass(frozen=True)
class Calculation:
    """A number and what is added to it or taken away, in order; no result is below 0 or above 9."""

    start: int
    changes: tuple[int, ...]

    @property
    def held_out(self) -> bool:
        """Whether it belongs to the evaluation, whatever the words around it."""
        numbers = f"{self.start}{self.changes}"
        return hashlib.sha256(numbers.encode()).digest()[0] % HELD_OUT_SHARE == 0

    def worked_answer(self) -> str:
        """The steps, one per line, and the result after ####."""
        total, lines = self.start, []
        for change in self.changes:
            lines.append(f"{total}{change:+d}={total + change}")
            total += change
        return "\n".join([*lines, f"#### {total}"])

    def question(self, rng: random.Random) -> str:
        """The calculation in words, which `rng` chooses."""
        name, item = rng.choice(NAMES), rng.choice(ITEMS)
        events = [
            f"{rng.choice(GAINS if change > 0 else LOSSES)} {abs(change)}"
            for change in self.changes
        ]
        return (
            f"{name} has {self.start} {item}, {', '.join(events)}. "
            f"How many {item} does {name} have now?"
        )


def draw(rng: random.Random) -> Calculation:
    """A calculation of two to four steps."""
    start = total = rng.randint(2, 9)
    changes: list[int] = []
    for _ in range(rng.randint(2, 4)):
        change = rng.choice([c for c in range(-9, 10) if c and 0 <= total + c <= 9])
        changes.append(change)
        total += change
    return Calculation(start, tuple(changes))


def split(name: str, rows: int, seed: int) -> list[dict[str, str]]:
    """Rows of "train" or "eval"; no two have the same calculation."""
    rng = random.Random(f"{seed}/{name}")
    chosen: dict[Calculation, dict[str, str]] = {}
    while len(chosen) < rows:
        made = draw(rng)
        if made.held_out == (name == "eval") and made not in chosen:
            chosen[made] = {"question": made.question(rng), "answer": made.worked_answer()}
    return list(chosen.values())


def main(arguments: Sequence[str] | None = None) -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/math_words"))
    parser.add_argument("--train-rows", type=int, default=4000)
    parser.add_argument("--eval-rows", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1234)
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", options.train_rows), ("eval", options.eval_rows)):
        file = options.output / f"{name}.jsonl"
        lines = [json.dumps(row) for row in split(name, rows, options.seed)]
        file.write_text("\n".join(lines) + "\n")
        print(f"{file}: {rows} problems", flush=True)


if __name__ == "__main__":
    main()
