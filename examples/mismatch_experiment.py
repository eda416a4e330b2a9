"""How the corrections cope with a quantized and stale rollout policy.

Runs the built-in task with int8 rollouts and weights up to 4 versions old, under several corrections and seeds,
and writes a table (Markdown and JSON) and a plot of the reward.

    python examples/mismatch_experiment.py --output runs/mismatch            # all, about half an hour on 2 cores
    python examples/mismatch_experiment.py --arms none vanilla_tis --seeds 1 2 --num-rollouts 60

An arm that has finished is not run again: delete its directory to repeat it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMON = [
    *("--async-rollouts", "--max-weight-staleness", "4", "--rollout-quantization", "int8"),
    "--get-mismatch-metrics",
]
ARMS: dict[str, list[str]] = {
    "none": ["--allow-biased-correction"],
    "vanilla_tis": ["--use-tis"],
    "icepop": ["--policy-loss", "icepop"],
    "off_policy_is": [
        *("--policy-loss", "reinforce", "--use-tis"),
        *("--custom-tis-function-path", "plugin.ppo_utils.off_policy_is_function"),
    ],
    "dppo_tv": ["--policy-loss", "dppo_tv"],
    "ipo_kl": ["--policy-loss", "ipo_kl"],
    "rollout_kl": [
        *("--use-rollout-kl-loss", "--rollout-kl-loss-coef", "0.1"),
        "--allow-biased-correction",  # it pulls towards the rollout policy and corrects no weight
    ],
}
LAST = 10


def run_arm(name: str, seed: int, rollouts: int, output: Path) -> list[dict[str, Any]]:
    """The metrics of every step of one run; runs it unless it is complete."""
    run_dir = output / f"{name}-{seed}"
    metrics = run_dir / "metrics.jsonl"
    if not metrics.exists() or metrics.read_text().count("\n") < rollouts:
        if metrics.exists():
            metrics.unlink()
        sizes = ["--seed", str(seed), "--num-rollouts", str(rollouts), "--run-dir", str(run_dir)]
        command = [sys.executable, "-m", "plugin", "train", *COMMON, *ARMS[name], *sizes]
        print(" ".join(command[3:]), flush=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in metrics.open()]


def summarize(runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Means over seeds of what an arm reached."""
    finals = [statistics.mean(step["reward"] for step in run[-LAST:]) for run in runs]
    reached = [next((step["step"] for step in run if step["reward"] >= 0.9), None) for run in runs]
    return {
        "final_reward": finals,
        "steps_to_0.9": reached,
        "mean_reward": statistics.mean(step["reward"] for run in runs for step in run),
        "mismatch_kl": statistics.mean(step["mismatch_kl"] for run in runs for step in run),
        "ess_share": statistics.mean(
            step.get("mismatch/ess_share") or 0.0 for run in runs for step in run
        ),
        "staleness": statistics.mean(step["staleness"] for run in runs for step in run),
        "grad_norm_max": max(step["grad_norm"] for run in runs for step in run),
    }


def table(summaries: dict[str, dict[str, Any]]) -> str:
    """The summaries as a Markdown table."""
    lines = [
        f"| arm | reward, last {LAST} steps, per seed | steps to 0.9, per seed | mean reward of the run "
        "| mismatch KL | ESS / N | staleness | largest gradient norm |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in summaries.items():
        finals = ", ".join(f"{value:.2f}" for value in row["final_reward"])
        reached = ", ".join(
            "never" if value is None else str(value) for value in row["steps_to_0.9"]
        )
        lines.append(
            f"| {name} | {finals} | {reached} | {row['mean_reward']:.3f} | {row['mismatch_kl']:.1e} | "
            f"{row['ess_share']:.3f} | {row['staleness']:.2f} | {row['grad_norm_max']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def plot(runs: dict[str, list[list[dict[str, Any]]]], file: Path) -> None:
    """Reward over steps, mean of the seeds as a line, their range as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name, seeds in runs.items():
        steps = range(1, min(len(run) for run in seeds) + 1)
        columns = [[run[i - 1]["reward"] for run in seeds] for i in steps]
        line = axes.plot(steps, [statistics.mean(column) for column in columns], label=name)[0]
        low, high = [min(c) for c in columns], [max(c) for c in columns]
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    axes.set_xlabel("step")
    axes.set_ylabel("reward")
    axes.set_title("int8 rollouts, weights up to 4 versions old")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    """Runs the arms and writes results.md, results.json and reward.svg."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--num-rollouts", type=int, default=100)
    parser.add_argument("--output", type=Path, default=Path("runs/mismatch_experiment"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    runs = {
        name: [run_arm(name, seed, options.num_rollouts, options.output) for seed in options.seeds]
        for name in options.arms
    }
    summaries = {name: summarize(seeds) for name, seeds in runs.items()}
    (options.output / "results.json").write_text(json.dumps(summaries, indent=2) + "\n")
    (options.output / "results.md").write_text(table(summaries))
    plot(runs, options.output / "reward.svg")
    print(table(summaries))


if __name__ == "__main__":
    main()
