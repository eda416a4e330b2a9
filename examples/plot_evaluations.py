"""Accuracy on held-out problems over the runs of several seeds: a picture, and a table on the terminal.

    python examples/plot_evaluations.py docs/images/math_words.svg runs/seed_1 runs/seed_2 runs/seed_3

The data go into a .json file beside the picture, so that it can be redrawn without the runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plugin.observe.run_record import read_run

#: Of an evaluation's line in metrics.jsonl, what is drawn.
NAMES = ("mean", "mean/ci_low", "mean/ci_high", "response_length")


def shown_of(run_dir: Path) -> dict[str, Any]:
    """Seed, training rewards and evaluations of a run."""
    run = read_run(run_dir)
    return {
        "seed": run.config["seed"],
        "steps": [line["step"] for line in run.steps],
        "rewards": [line["reward"] for line in run.steps],
        "evaluations": [
            {"step": line["step"], **{name: line[f"eval/held-out/{name}"] for name in NAMES}}
            for line in run.evaluations
        ],
    }


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Accuracy before and after with its 95 % interval, one row per seed, and the spread."""
    rows = ["| seed | before | after |", "|---|---|---|"]
    for run in runs:
        ends = [
            f"{e['mean']:.1%} [{e['mean/ci_low']:.1%}, {e['mean/ci_high']:.1%}]"
            for e in (run["evaluations"][0], run["evaluations"][-1])
        ]
        rows.append(f"| {run['seed']} | {ends[0]} | {ends[1]} |")
    spread = []
    for end in (0, -1):
        values = [run["evaluations"][end]["mean"] for run in runs]
        spread.append(f"{min(values):.1%} to {max(values):.1%}")
    return "\n".join([*rows, f"| all | {spread[0]} | {spread[1]} |"])


def draw(runs: Sequence[dict[str, Any]], file: Path) -> None:
    """Left: accuracy on held-out problems, a line per seed. Right: how long answers are."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = file.stem  # the same runs give the same file
    from matplotlib import pyplot

    figure, (accuracy, length) = pyplot.subplots(1, 2, figsize=(9.5, 3.6), width_ratios=(2, 1))
    for run, color in zip(runs, ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd"), strict=False):
        evaluations = run["evaluations"]
        places = [line["step"] for line in evaluations]
        mean, low, high, tokens = ([line[name] for line in evaluations] for name in NAMES)
        accuracy.fill_between(places, low, high, color=color, alpha=0.12, linewidth=0)
        accuracy.plot(places, mean, "o-", color=color, label=f"seed {run['seed']}")
        length.plot(places, tokens, "o-", color=color)
    accuracy.set_ylim(0, 1.05)
    accuracy.set_title("accuracy on held-out problems, greedy, 95 % interval", fontsize=10)
    accuracy.legend(loc="lower right", fontsize=8)
    length.set_ylim(0, 1.15 * length.get_ylim()[1])
    length.set_title("tokens of a held-out answer", fontsize=10)
    for axes in (accuracy, length):
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the runs that are named, or those of the data file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("run_dirs", type=Path, nargs="*")
    options = parser.parse_args(arguments)
    data = options.file.with_suffix(".json")
    if options.run_dirs:
        runs = [shown_of(run_dir) for run_dir in options.run_dirs]
        data.write_text(json.dumps(runs, indent=1) + "\n")
    runs = json.loads(data.read_text())
    draw(runs, options.file)
    print(table(runs))


if __name__ == "__main__":
    main()
