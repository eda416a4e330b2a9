"""The figures of the evidence page, and the one of the landing page.

Reward against staleness, where runs collapse, curves over a run; and the problem with its cure in one picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean
from typing import Any

from benchmarks.evidence.arms import EQUAL_TO_PPO
from benchmarks.evidence.engine import SEEDS, Setting
from benchmarks.evidence.grid import CHECK, SETTINGS, STALENESS
from benchmarks.evidence.simulation import EVALUATE_EVERY
from benchmarks.evidence.summary import (
    DOCS,
    Results,
    collapsed,
    interval,
    paired_interval,
    ranked_arms,
    setting_name,
)

STALENESS_FIGURE = DOCS / "images/evidence_staleness.svg"
COLLAPSE_FIGURE = DOCS / "images/evidence_collapse.svg"
CURVES_FIGURE = DOCS / "images/evidence_curves.svg"
LANDING_FIGURE = DOCS / "images/collapse_and_correction.svg"
FIGURES = (STALENESS_FIGURE, COLLAPSE_FIGURE, CURVES_FIGURE, LANDING_FIGURE)
#: How far the engine of the landing figure's curves is behind, in rollouts.
LANDING_STALENESS = 16
#: Arm -> color of the curves; the uncorrected one is gray.
CURVES = {
    "ppo": "#6b7280",
    "ppo + vanilla_tis": "#1f6fb4",
    "icepop": "#d1495b",
    "ppo + icepop": "#e9a03b",
}
CURVE_STALENESS = (4, 16, 64)


def draw(found: Results) -> None:
    """Write all figures; with nothing measured there are none."""
    settings = {setting for _, setting in found}
    main = [Setting(s) for s in STALENESS if Setting(s) in settings]
    if not main:
        return
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "evidence", "axes.spines.top": False, "axes.spines.right": False}
    )
    from matplotlib import pyplot

    _landing(pyplot, found, main)
    _staleness(pyplot, found, main)
    others = (s for s in (*SETTINGS, *CHECK) if s in settings and s not in main)
    further = sorted(others, key=_by_axis)
    _collapse(pyplot, found, [*main, *further])
    _curves(pyplot, found, [Setting(s) for s in CURVE_STALENESS if Setting(s) in settings])


def _landing(pyplot: Any, found: Results, main: Sequence[Setting]) -> None:
    """Reward over a run, and at its end by staleness: fresh samples, stale ones, stale ones with TIS."""
    stale = Setting(LANDING_STALENESS)
    if stale not in main:
        return
    figure, (over, end) = pyplot.subplots(1, 2, figsize=(9.2, 3.5), width_ratios=(1.25, 1))
    runs = (
        ("PPO, fresh samples", 0.02, "ppo", Setting(0), "#6b7280", "dashed"),
        ("PPO + TIS", -0.02, "ppo + vanilla_tis", stale, "#1f6fb4", "solid"),
        ("PPO, uncorrected", 0.0, "ppo", stale, "#d1495b", "solid"),
    )
    for label, lift, name, setting, color, style in runs:
        curves = found[name, setting]["rewards"]
        steps = [EVALUATE_EVERY * i for i in range(len(curves[0]))]
        for curve in curves if setting.staleness else ():
            over.plot(steps, curve, color=color, linewidth=0.7, alpha=0.35)
        middle = [mean(values) for values in zip(*curves, strict=True)]
        over.plot(steps, middle, color=color, linestyle=style, linewidth=2.2)
        over.text(steps[-1] + 2, middle[-1] + lift, label, color=color, fontsize=9, va="center")
    over.set_title(
        f"reward over a run, engine {LANDING_STALENESS} rollouts behind", fontsize=10, loc="left"
    )
    over.set_xlabel("rollout", fontsize=9)
    over.set_ylabel("reward", fontsize=9)
    over.set_xlim(0, steps[-1] * 1.4)
    over.set_xticks(range(0, steps[-1] + 1, 40))
    places = range(len(main))
    for name, color in (("ppo + vanilla_tis", "#1f6fb4"), ("ppo", "#d1495b")):
        finals = [found[name, s]["final"] for s in main]
        for seed in zip(*finals, strict=True):
            end.plot(places, seed, color=color, linewidth=0.7, alpha=0.35)
        end.plot(
            places,
            [mean(values) for values in finals],
            color=color,
            linewidth=2.2,
            marker="o",
            markersize=4,
        )
    end.set_title("final reward by staleness", fontsize=10, loc="left")
    end.set_xlabel("staleness: rollouts the engine is behind", fontsize=9)
    end.set_xticks(places, [str(s.staleness) for s in main])
    for axes in (over, end):
        axes.set_ylim(0.3, 0.95)
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.6)
        axes.tick_params(labelsize=8)
    _save(pyplot, figure, LANDING_FIGURE)


def _by_axis(s: Setting) -> tuple[object, ...]:
    return s.updates, s.top_p < 1, s.mixture, s.engine, s.staleness, s.mask_replay or s.route_replay


def _staleness(pyplot: Any, found: Results, main: Sequence[Setting]) -> None:
    names, columns = _drawn(ranked_arms(found, main)), 6
    rows = -(-len(names) // columns)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(12.5, 1.75 * rows), sharex=True, sharey=True
    )
    places = range(len(main))
    plain = [mean(found["ppo", s]["final"]) for s in main]
    for axes, name in zip(grid.flat, names, strict=False):
        own = [i for i, s in enumerate(main) if (name, s) in found]
        bands = [paired_interval(found, name, main[i]) for i in own]
        axes.plot(places, plain, color="#9aa1a9", linestyle="dashed", linewidth=1.1)
        axes.fill_between(
            own,
            [m - h for m, h in bands],
            [m + h for m, h in bands],
            color="#1f6fb4",
            alpha=0.22,
            linewidth=0,
        )
        axes.plot(
            own, [m for m, _ in bands], color="#1f6fb4", linewidth=1.8, marker="o", markersize=2.5
        )
        axes.set_title(_wrapped(name), fontsize=7.5, loc="left")
        axes.set_xticks(places, [str(s.staleness) for s in main])
        axes.set_ylim(0.3, 0.9)
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.6)
        axes.tick_params(labelsize=7)
    for axes in grid.flat[len(names) :]:
        axes.set_visible(False)
    figure.supxlabel(
        "staleness: rollouts between the engine's weights and the trainer's", fontsize=9
    )
    figure.supylabel("final reward (dashed: ppo, uncorrected)", fontsize=9)
    _save(pyplot, figure, STALENESS_FIGURE)


def _collapse(pyplot: Any, found: Results, settings: Sequence[Setting]) -> None:
    names = _drawn(ranked_arms(found, settings))
    shares = [
        [mean(collapsed(found[name, s])) if (name, s) in found else math.nan for s in settings]
        for name in names
    ]
    figure, axes = pyplot.subplots(figsize=(3.6 + 0.38 * len(settings), 2.4 + 0.21 * len(names)))
    axes.set_facecolor("#e5e7eb")
    image = axes.imshow(shares, cmap="OrRd", vmin=0, vmax=1, aspect="auto")
    labels = [setting_name(s) for s in settings]
    axes.set_xticks(range(len(settings)), labels, fontsize=7, rotation=55, ha="right")
    axes.set_yticks(range(len(names)), [_short(name) for name in names], fontsize=7)
    for row, values in enumerate(shares):
        for column, share in enumerate(values):
            if share:
                axes.text(
                    column,
                    row,
                    "" if math.isnan(share) else f"{SEEDS * share:.0f}",
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color="white" if share > 0.5 else "black",
                )
    bar = figure.colorbar(image, shrink=0.5)
    bar.set_label("share of runs that collapsed\n(numbers: of 5; gray: not run)", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    _save(pyplot, figure, COLLAPSE_FIGURE)


def _curves(pyplot: Any, found: Results, settings: Sequence[Setting]) -> None:
    if not settings:
        return
    figure, grid = pyplot.subplots(
        3,
        len(settings),
        figsize=(3.6 * len(settings), 6.6),
        sharex=True,
        sharey="row",
        squeeze=False,
    )
    for column, setting in enumerate(settings):
        for name, color in CURVES.items():
            row = found[name, setting]
            bands = _paired_curve(row["rewards"], [found[n, setting]["rewards"] for n in CURVES])
            steps = [EVALUATE_EVERY * i for i in range(len(bands))]
            top, middle, bottom = grid[:, column]
            top.fill_between(
                steps,
                [m - h for m, h in bands],
                [m + h for m, h in bands],
                color=color,
                alpha=0.18,
                linewidth=0,
            )
            top.plot(steps, [m for m, _ in bands], color=color, linewidth=1.7, label=name)
            ends = steps[1:]
            middle.plot(ends, row["kl_curve"], color=color, linewidth=1.5)
            bottom.plot(ends, [1 - kept for kept in row["kept_curve"]], color=color, linewidth=1.5)
        grid[0, column].set_title(f"staleness {setting.staleness}", fontsize=10)
        grid[1, column].set_yscale("log")
        grid[2, column].set_xlabel("rollout", fontsize=9)
    for axes, label in zip(
        grid[:, 0],
        ("reward", "KL per token, engine and policy", "share of tokens masked"),
        strict=True,
    ):
        axes.set_ylabel(label, fontsize=9)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=len(CURVES), fontsize=9, frameon=False)
    for axes in grid.flat:
        axes.grid(color="#e5e7eb", linewidth=0.6)
        axes.tick_params(labelsize=8)
    _save(pyplot, figure, CURVES_FIGURE, below=0.04)


def _drawn(names: Sequence[str]) -> list[str]:
    """Without those that are `ppo` wherever a rollout has one update."""
    return [name for name in names if name not in EQUAL_TO_PPO]


def _paired_curve(
    own: list[list[float]], all_arms: Sequence[list[list[float]]]
) -> list[tuple[float, float]]:
    """By evaluation the mean of the seeds and half of the 95 % interval of the difference from these arms' mean."""
    points = []
    for i, values in enumerate(zip(*own, strict=True)):
        usual = [mean(arm[seed][i] for arm in all_arms) for seed in range(len(own))]
        _, half = interval([a - b for a, b in zip(values, usual, strict=True)])
        points.append((mean(values), half))
    return points


def _short(name: str) -> str:
    for long, short in (
        ("use-rollout-kl-loss, rollout-kl-loss-coef", "rollout KL"),
        ("use-rollout-logprobs", "rollout log-probs"),
    ):
        name = name.replace(long, short)
    return name


def _wrapped(name: str) -> str:
    return _short(name).replace(", ", ",\n", 1)


def _save(pyplot: Any, figure: Any, path: Any, below: float = 0.0) -> None:
    figure.tight_layout(rect=(0, below, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
