"""Accuracy on held-out sums, all weights beside adapters, from two run directories or from the saved numbers.

python examples/real_model/lora/plot_curves.py FULL_RUN LORA_RUN    # writes docs/images/lora_real.json and .svg
python examples/real_model/lora/plot_curves.py                      # draws lora_real.json again
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from plugin.observe.run_record import read_run

FILE = Path("docs/images/lora_real.json")
COLORS = {"all weights": "#1f77b4", "adapters": "#d62728"}
EVALUATED = ("mean", "mean/ci_low", "mean/ci_high")
STEP = ("step", "reward", "mismatch_kl", "grad_norm", "entropy_loss", "uniform_group_share")


def shown_of(run_dir: Path) -> dict[str, Any]:
    """Settings, steps and evaluations of a run."""
    run = read_run(run_dir)
    return {
        "settings": {name: run.config[name] for name in ("lr", "lora_rank", "lora_sync", "seed")},
        "steps": [{name: line[name] for name in STEP} for line in run.steps],
        "evaluations": [
            {"step": line["step"], **{name: line[f"eval/held-out/{name}"] for name in EVALUATED}}
            for line in run.evaluations
        ],
    }


def draw(runs: dict[str, dict[str, Any]], file: Path) -> None:
    """Left: greedy accuracy on held-out rows with its interval. Right: the reward of training."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "lora_real"  # the same numbers give the same file
    from matplotlib import pyplot

    figure, (accuracy, reward) = pyplot.subplots(1, 2, figsize=(9.5, 3.6), sharey=True)
    for name, run in runs.items():
        settings, color = run["settings"], COLORS[name]
        rank = f"rank {settings['lora_rank']}, " if settings["lora_rank"] else ""
        places = [line["step"] for line in run["evaluations"]]
        mean, low, high = ([line[key] for line in run["evaluations"]] for key in EVALUATED)
        accuracy.fill_between(places, low, high, color=color, alpha=0.12, linewidth=0)
        label = f"{name}, {rank}lr {settings['lr']:g}: {mean[0]:.0%} to {mean[-1]:.0%}"
        accuracy.plot(places, mean, "o-", color=color, label=label)
        steps = run["steps"]
        reward.plot([s["step"] for s in steps], [s["reward"] for s in steps], color=color)
    accuracy.set_title("held-out sums: accuracy, greedy, 95 % interval", fontsize=10)
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
    parser.add_argument("runs", type=Path, nargs="*", help="of all weights, of adapters")
    parser.add_argument("--image", type=Path, default=FILE.with_suffix(".svg"))
    options = parser.parse_args()
    if options.runs:
        found = dict(zip(COLORS, map(shown_of, options.runs), strict=True))
        FILE.write_text(json.dumps(found, indent=1) + "\n")
    draw(json.loads(FILE.read_text()), options.image)
    print(options.image)


if __name__ == "__main__":
    main()
