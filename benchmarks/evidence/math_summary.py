"""From the runs of `math_jobs` to the tables and the figure in the docs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from benchmarks.evidence.grid import Row, read_rows
from benchmarks.evidence.math_jobs import ARMS, CHANGED, DATA, EVALUATED, SEEDS, STALENESS, arms_at
from benchmarks.evidence.summary import APPENDIX, DOCS, interval, wrapped
from benchmarks.marked_pages import write_marked

FIGURE = DOCS / "images/evidence_math.svg"
Found = dict[tuple[str, int, int], Row]
Seeds = dict[int, list[int]]


def measured(rows: Sequence[Row]) -> tuple[Found, Seeds]:
    """Rows by arm, staleness and seed; by staleness the seeds of which every run has been made: only these are shown."""
    found = {(row["arm"], row["staleness"], row["seed"]): row for row in rows}
    whole = {
        s: [seed for seed in SEEDS if all((a.name, s, seed) in found for a in arms_at(s))]
        for s in (0, *sorted(STALENESS))
    }
    return found, {staleness: seeds for staleness, seeds in whole.items() if seeds}


def final_accuracy(
    found: Found, seeds: Sequence[int], name: str, staleness: int
) -> tuple[float, float]:
    """Mean at the end, and half of the 95 % interval of the difference from the mean of all arms on the same seed."""
    names = [arm.name for arm in arms_at(staleness)]
    own = [found[name, staleness, seed]["accuracy"][-1] for seed in seeds]
    usual = [mean(found[n, staleness, seed]["accuracy"][-1] for n in names) for seed in seeds]
    _, half = interval([a - b for a, b in zip(own, usual, strict=True)])
    return mean(own), half


def table(rows: Sequence[Row]) -> str:
    """Every arm at every staleness, for the appendix."""
    found, seeds = measured(rows)
    stale = [s for s in seeds if s]
    if not stale or 0 not in seeds:
        return "Not measured yet: `make evidence-math`."
    fresh = [found["ppo", 0, seed]["accuracy"] for seed in seeds[0]]
    counts = ", ".join(f"{len(seeds[s])} at {s}" for s in (0, *stale))
    names = sorted(
        (arm.name for arm in ARMS),
        key=lambda name: -mean(final_accuracy(found, seeds[s], name, s)[0] for s in stale),
    )
    lines = [
        wrapped(
            f"Accuracy on {EVALUATED} held-out problems after {CHANGED['num_rollouts']} rollouts, greedy, mean of the seeds (staleness: {counts}) "
            "± half of the 95 % interval of the difference from the mean of all arms on the same seed. Before: "
            f"{mean(curve[0] for curve in fresh):.3f}; `ppo` on the engine's own policy ends at "
            f"{mean(curve[-1] for curve in fresh):.3f}. *on the way*: mean of the evaluations after the start; *KL*, *ESS*, *kept*: means of the "
            "last 8 rollouts; *norm*: the largest gradient norm."
        ),
    ]
    for staleness in reversed(stale):
        lines += [
            "",
            f"| staleness {staleness} | accuracy | by seed | on the way | KL | ESS | kept | norm |",
            "|---" * 8 + "|",
            *(_line(found, seeds[staleness], name, staleness) for name in names),
        ]
    return "\n".join(lines)


def _line(found: Found, seeds: Sequence[int], name: str, staleness: int) -> str:
    middle, half = final_accuracy(found, seeds, name, staleness)
    own = [found[name, staleness, seed] for seed in seeds]

    def late(column: str) -> float:
        return mean(value for row in own for value in row[column][-8:])

    numbers = (
        f"{middle:.3f} ± {half:.3f}" if len(own) > 1 else f"{middle:.3f}",
        ", ".join(f"{row['accuracy'][-1]:.2f}" for row in own),
        f"{mean(value for row in own for value in row['accuracy'][1:]):.3f}",
        f"{late('mismatch_kl'):.1e}",
        f"{late('ess_share'):.2f}",
        f"{late('kept_share'):.2f}",
        f"{max(value for row in own for value in row['grad_norm']):.2g}",
    )
    return f"| `{name}` | {' | '.join(numbers)} |"


def draw(rows: Sequence[Row]) -> None:
    """Held-out accuracy over the rollouts, a panel per staleness, every seed as a thin line."""
    found, seeds = measured(rows)
    stale = [s for s in seeds if s]
    if not stale or 0 not in seeds:
        return
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "evidence", "axes.spines.top": False, "axes.spines.right": False}
    )
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        1, len(stale), figsize=(1 + 4.8 * len(stale), 4.2), sharey=True, squeeze=False
    )
    every = CHANGED["eval_interval"]
    colors = pyplot.get_cmap("tab10")
    for axes, staleness in zip(grid[0], stale, strict=True):
        runs = [
            ("ppo", 0, "#9aa1a9"),
            *((a.name, staleness, colors(i)) for i, a in enumerate(ARMS)),
        ]
        for name, age, color in runs:
            curves = [found[name, age, seed]["accuracy"] for seed in seeds[age]]
            places = [every * i for i in range(len(curves[0]))]
            label = f"{_short(name)}{'' if age else ', staleness 0'}"
            middle = [mean(values) for values in zip(*curves, strict=True)]
            style: dict[str, Any] = {"color": color, "linestyle": "-" if age else "--"}
            axes.plot(places, middle, linewidth=1.8, label=label, **style)
            for curve in curves:
                axes.plot(places, curve, linewidth=0.5, alpha=0.35, **style)
        axes.set_title(f"engine {staleness} rollouts behind", fontsize=10)
        axes.set_xlabel("rollout", fontsize=9)
        axes.grid(color="#e5e7eb", linewidth=0.6)
        axes.tick_params(labelsize=8)
    grid[0, 0].set_ylabel("held-out accuracy", fontsize=9)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=3, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.17, 1, 1))
    figure.savefig(FIGURE, metadata={"Date": None})
    pyplot.close(figure)


def _short(name: str) -> str:
    return name.replace("use-rollout-kl-loss, rollout-kl-loss-coef", "rollout KL")


def write_table() -> None:
    """Write the table into the appendix and the figure of the page."""
    rows = read_rows(DATA)
    write_marked(APPENDIX, "math", table(rows))
    draw(rows)
