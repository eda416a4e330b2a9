"""The accuracy on held-out problems over a run of `make train-math`, as a picture.

python examples/math_words/plot_eval.py RUN_DIRECTORY docs/images/math_words.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def read_lines(run_dir: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Steps and evaluations of a run's metrics.jsonl."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    return [s for s in lines if "reward" in s], [e for e in lines if "eval/held-out/mean" in e]


def draw(run_dir: Path, file: Path) -> None:
    """Left: accuracy on held-out problems, and the reward of training. Right: how long answers are."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "math_words"  # the same run gives the same file
    from matplotlib import pyplot

    steps, evaluations = read_lines(run_dir)
    figure, (accuracy, length) = pyplot.subplots(1, 2, figsize=(9.5, 3.6), width_ratios=(2, 1))
    accuracy.plot(
        [step["step"] for step in steps],
        [step["reward"] for step in steps],
        color="#b0b0b0",
        label="training: reward of the groups with a spread",
    )
    places = [line["step"] for line in evaluations]
    mean, low, high, tokens = (
        [line[f"eval/held-out/{name}"] for line in evaluations]
        for name in ("mean", "mean/ci_low", "mean/ci_high", "response_length")
    )
    accuracy.fill_between(places, low, high, color="#1f77b4", alpha=0.15, linewidth=0)
    accuracy.plot(
        places,
        mean,
        "o-",
        color="#1f77b4",
        label="held-out problems: accuracy, greedy, 95 % interval",
    )
    for place, value, below in ((places[0], mean[0], -14), (places[-1], mean[-1], -16)):
        accuracy.annotate(
            f"{value:.1%}",
            (place, value),
            textcoords="offset points",
            xytext=(0, below),
            ha="center",
        )
    accuracy.set_ylim(0, 1.05)
    accuracy.legend(loc="lower right", fontsize=8)
    length.plot(places, tokens, "o-", color="#2ca02c")
    length.set_ylim(bottom=0)
    length.set_title("tokens of a held-out answer", fontsize=10)
    for axes in (accuracy, length):
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Draw the run that is named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    draw(options.run_dir, options.file)
    print(options.file)


if __name__ == "__main__":
    main()
