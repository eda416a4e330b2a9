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
    """Accuracy on held-out problems with its 95 % interval, and the reward of training."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "math_words"  # the same run gives the same file
    from matplotlib import pyplot

    steps, evaluations = read_lines(run_dir)
    figure, axes = pyplot.subplots(figsize=(7.5, 3.8))
    axes.plot(
        [step["step"] for step in steps],
        [step["reward"] for step in steps],
        color="#b8b8b8", linewidth=1, label="training reward, sampled groups",
    )  # fmt: skip
    places = [line["step"] for line in evaluations]
    mean, low, high = (
        [line[f"eval/held-out/mean{suffix}"] for line in evaluations]
        for suffix in ("", "/ci_low", "/ci_high")
    )
    axes.fill_between(places, low, high, color="#1f77b4", alpha=0.15, linewidth=0)
    axes.plot(places, mean, "o-", color="#1f77b4", label="accuracy on held-out problems, greedy")
    for place, value in ((places[0], mean[0]), (places[-1], mean[-1])):
        axes.annotate(
            f"{value:.0%}", (place, value), textcoords="offset points", xytext=(0, 9), ha="center"
        )
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("optimizer step")
    axes.legend(loc="lower right", fontsize=9)
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
