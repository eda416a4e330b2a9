"""Sums as rows of a prompt file: two worked sums, then one whose answer has two digits.

python examples/real_model/lora/make_sums.py --output runs/lora_sums
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path


def rows(seed: int) -> list[dict[str, str]]:
    """All 1,510 sums of a one-digit and a two-digit number below 100, in the order of the seed."""
    sums = [(a, b) for a in range(10, 95) for b in range(1, 10) if a + b < 100]
    sums += [(b, a) for a, b in sums]
    random.Random(seed).shuffle(sums)
    shots = "3 + 9 = 12\n21 + 8 = 29\n"
    return [{"prompt": f"{shots}{a} + {b} =", "answer": str(a + b)} for a, b in sums]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write train.jsonl and eval.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/lora_sums"))
    parser.add_argument("--eval", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1234)
    options = parser.parse_args(arguments)
    all_rows = rows(options.seed)
    options.output.mkdir(parents=True, exist_ok=True)
    parts = {"eval": all_rows[: options.eval], "train": all_rows[options.eval :]}
    for name, part in parts.items():
        text = "".join(json.dumps(row) + "\n" for row in part)
        (options.output / f"{name}.jsonl").write_text(text)
    print(f"{options.output}: {len(parts['train'])} rows to train on, {options.eval} held out")


if __name__ == "__main__":
    main()
