"""Sums from reasoning-gym as rows of a prompt file: training rows, and held-out rows that never occur among them.

python examples/real_model/make_data.py --output runs/real_model
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def messages(question: str) -> list[dict[str, str]]:
    """A conversation that asks for `question` after one worked example, so that the form of an answer is given."""
    example = "State the final answer to the following arithmetic problem: 12 + 7 ="
    return [
        {"role": "system", "content": "Calculate."},
        {"role": "user", "content": example},
        {"role": "assistant", "content": "12 + 7 = 19"},
        {"role": "user", "content": question},
    ]


def problems(seed: int) -> Iterator[dict[str, Any]]:
    """Without end: distinct sums and differences of two numbers below 100, in reasoning-gym's words."""
    import reasoning_gym

    seen: set[str] = set()
    while True:
        sizes = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
        for entry in reasoning_gym.create_dataset("chain_sum", size=1000, seed=seed, **sizes):
            if entry["question"] not in seen:
                seen.add(entry["question"])
                yield {"messages": messages(entry["question"]), "answer": entry["answer"]}
        seed += 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Write train.jsonl and eval.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/real_model"))
    parser.add_argument("--train", type=int, default=2000)
    parser.add_argument("--eval", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1234)
    options = parser.parse_args(arguments)
    rows = problems(options.seed)
    options.output.mkdir(parents=True, exist_ok=True)
    for name, count in (("eval", options.eval), ("train", options.train)):
        text = "".join(json.dumps(next(rows)) + "\n" for _ in range(count))
        (options.output / f"{name}.jsonl").write_text(text)
    print(f"{options.output}: {options.train} rows to train on, {options.eval} held out")


if __name__ == "__main__":
    main()
