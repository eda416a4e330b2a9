"""Accuracy on held-out sums, all weights beside adapters, from run directories or from the saved numbers.

python examples/real_model/lora/plot_curves.py RUN RUN...    # writes docs/images/lora_real.json and .svg
python examples/real_model/lora/plot_curves.py               # draws lora_real.json again
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plugin.observe.run_record import read_run

FILE = Path("docs/images/lora_real.json")
COLORS = {"all weights": "#1f77b4", "adapters": "#d62728"}
STEP = ("step", "reward", "mismatch_kl", "grad_norm", "entropy_loss", "uniform_group_share")


def shown_of(run_dir: Path) -> dict[str, Any]:
    """Settings, steps and evaluations of a run."""
    run = read_run(run_dir)
    return {
        "settings": {name: run.config[name] for name in ("lr", "lora_rank", "lora_sync", "seed")},
        "steps": [{name: line[name] for name in STEP} for line in run.steps],
        "evaluations": [
            {"step": line["step"], "mean": line["eval/held-out/mean"]} for line in run.evaluations
        ],
    }


def draw(runs: Sequence[dict[str, Any]], file: Path) -> None:
    """Left: greedy accuracy on held-out rows. Right: the reward of training. Thin lines are seeds."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "lora_real"  # the same numbers give the same file
    from matplotlib import pyplot

    figure, (accuracy, reward) = pyplot.subplots(1, 2, figsize=(9.5, 3.6), sharey=True)
    for name, color in COLORS.items():
        mine = [run for run in runs if bool(run["settings"]["lora_rank"]) == (name == "adapters")]
        for axes, part, value in ((accuracy, "evaluations", "mean"), (reward, "steps", "reward")):
            places = [line["step"] for line in mine[0][part]]
            curves = [[line[value] for line in run[part]] for run in mine]
            for curve in curves:
                axes.plot(places, curve, color=color, alpha=0.3, linewidth=1)
            mean = [sum(values) / len(curves) for values in zip(*curves, strict=True)]
            label = f"{name}, lr {mine[0]['settings']['lr']:g}: {mean[0]:.0%} to {mean[-1]:.0%}"
            axes.plot(places, mean, "o-" if axes is accuracy else "-", color=color, label=label)
    accuracy.set_title(
        f"held-out sums: greedy accuracy, mean of {len(runs) // 2} seeds", fontsize=10
    )
    reward.set_title("training: mean reward of a rollout", fontsize=10)
    accuracy.set_ylim(0, 1.02)
    accuracy.legend(loc="lower right", fontsize=8)
    for axes in (accuracy, reward):
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> None:
    """Save the numbers of the runs that are named, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "runs", type=Path, nargs="*", help="of all weights and of adapters, the same seeds"
    )
    parser.add_argument("--image", type=Path, default=FILE.with_suffix(".svg"))
    options = parser.parse_args()
    if options.runs:
        found = [shown_of(run_dir) for run_dir in options.runs]
        FILE.write_text(json.dumps(found, indent=1) + "\n")
    draw(json.loads(FILE.read_text()), options.image)
    print(options.image)


if __name__ == "__main__":
    main()
