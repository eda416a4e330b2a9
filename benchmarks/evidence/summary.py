"""From the data to a table in the docs and two figures; nothing here is written by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.evidence.grid import SEEDS, results

DOCS = Path(__file__).parents[2] / "docs"
PAGE, BEGIN, END = (
    DOCS / "which_correction.md",
    "<!-- evidence: begin -->",
    "<!-- evidence: end -->",
)
FIGURE, HEAT_MAP = DOCS / "images/evidence_staleness.svg", DOCS / "images/evidence_collapse.svg"
#: 97.5 % points of Student's t by the number of seeds.
_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
Rows = Sequence[dict[str, Any]]


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and half of its 95 % interval; None with fewer than two seeds."""
    if len(values) < 2:
        return mean(values), None
    factor = _T.get(len(values), 1.96)
    return mean(values), factor * stdev(values) / math.sqrt(len(values))


def method_name(row: dict[str, Any]) -> str:
    return row["loss"] if row["hook"] is None else f"{row['loss']} + {row['hook']}"


def by_method(rows: Rows, chosen: Callable[[dict[str, Any]], bool]) -> dict[str, list[dict[str, Any]]]:  # fmt: skip
    """Method -> its runs among the chosen ones, in the order of the catalog."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if chosen(row):
            found.setdefault(method_name(row), []).append(row)
    return found


def table(rows: Rows) -> str:
    """Final reward by staleness, one line per method, the best first; then the other settings."""
    main = [row for row in rows if _is_main(row)]
    if not main:
        return "No run has been made yet: `make evidence`."
    columns = sorted({row["staleness"] for row in main})
    seeds = _seeds(main)
    lines = [
        f"Final reward (share of right digits) by staleness, {seeds} of {SEEDS} seeds; mean ± half of the 95 % interval; all methods at "
        "their defaults, sorted by the mean over all columns. *collapsed*: share of runs that end 0.05 below their start or "
        "0.2 below their best. *norm*: largest gradient norm. *ESS*, *kept*: of exp(cur - rollout) and of tokens, at the "
        "largest staleness.\n",
        f"| method | {' | '.join(map(str, columns))} | collapsed | norm | ESS | kept |",
        "|---" * (len(columns) + 5) + "|",
    ]
    methods = by_method(main, lambda row: True)
    ranked = sorted(methods.items(), key=lambda item: -mean(r["final"] for r in item[1]))
    for name, runs in ranked:
        cells = [_cell([r["final"] for r in runs if r["staleness"] == s]) for s in columns]
        stalest = [r for r in runs if r["staleness"] == columns[-1]] or runs
        numbers = (
            f"{mean(r['collapsed'] for r in runs):.0%}",
            f"{max(r['largest_gradient_norm'] for r in runs):.2g}",
            f"{mean(r['ess_share'] for r in stalest):.2f}",
            f"{mean(r['kept_share'] for r in stalest):.2f}",
        )
        lines.append(f"| `{name}` | {' | '.join((*cells, *numbers))} |")
    return "\n".join([*lines, *_further(rows)])


def _further(rows: Rows) -> list[str]:
    settings = sorted({_setting(row) for row in rows if not _is_main(row)})
    if not settings:
        return ["", "Not measured yet: bfloat16 and int8 engines, four updates per rollout."]
    heads = [f"{engine}, {updates} updates, {stale}" for engine, updates, stale in settings]
    lines = ["", "Final reward in other settings (engine, updates per rollout, staleness).\n"]
    lines += [f"| method | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name, runs in by_method(rows, lambda row: not _is_main(row)).items():
        cells = [
            _cell([r["final"] for r in runs if _setting(r) == setting]) for setting in settings
        ]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines


def _is_main(row: dict[str, Any]) -> bool:
    """Whether only the staleness varies: a float32 engine, one update per rollout."""
    return row["engine"] == "float32" and row["updates"] == 1


def _setting(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["engine"], row["updates"], row["staleness"]


def _seeds(rows: Rows) -> str:
    counts = {len(runs) for runs in _cells(rows).values()}
    return str(max(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"


def _cells(rows: Rows) -> dict[tuple[str, int], list[dict[str, Any]]]:
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((method_name(row), row["staleness"]), []).append(row)
    return found


def _cell(values: Sequence[float]) -> str:
    if not values:
        return ""
    middle, half = interval(values)
    return f"{middle:.2f}" if half is None else f"{middle:.2f} ± {half:.2f}"


def write_summary() -> None:
    """Write the table into the page, and the figures beside it."""
    rows, text = results(), PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.split(END)[1]}")
    if rows:
        draw(rows)


def draw(rows: Rows) -> None:
    """Reward against staleness per method, with bands; and where runs collapse."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "evidence"
    from matplotlib import pyplot

    main = [row for row in rows if _is_main(row)]
    methods, columns = by_method(main, lambda row: True), sorted({r["staleness"] for r in main})
    places, width = list(range(len(columns))), 6
    height = math.ceil(len(methods) / width)
    figure, grid = pyplot.subplots(height, width, figsize=(2.2 * width, 1.9 * height), sharex=True, sharey=True)  # fmt: skip
    plain = [interval([r["final"] for r in methods["ppo"] if r["staleness"] == s])[0] for s in columns]  # fmt: skip
    for axes, (name, runs) in zip(grid.flat, methods.items(), strict=False):
        found = [interval([r["final"] for r in runs if r["staleness"] == s] or [math.nan]) for s in columns]  # fmt: skip
        middle, half = [f[0] for f in found], [f[1] or 0.0 for f in found]
        axes.plot(places, plain, color="#c9ced3", linestyle="dashed", linewidth=1.2)
        low, high = ([m + sign * h for m, h in zip(middle, half, strict=True)] for sign in (-1, 1))
        axes.fill_between(places, low, high, color="#1f6fb4", alpha=0.2, linewidth=0)
        axes.plot(places, middle, color="#1f6fb4", linewidth=1.8)
        axes.set_title(name, fontsize=7.5, loc="left")
        axes.set_xticks(places, [str(s) for s in columns])
        axes.set_ylim(0, 1)
        axes.tick_params(labelsize=7)
    for axes in grid.flat[len(methods) :]:
        axes.set_visible(False)
    figure.supxlabel("weight versions behind", fontsize=9)
    figure.supylabel("final reward (dashed: ppo without a correction)", fontsize=9)
    figure.tight_layout()
    figure.savefig(FIGURE, metadata={"Date": None})
    pyplot.close(figure)
    shares = [
        [mean([r["collapsed"] for r in runs if r["staleness"] == s] or [0]) for s in columns]
        for runs in methods.values()
    ]
    figure, axes = pyplot.subplots(figsize=(4.6, 0.24 * len(methods) + 1.2))
    image = axes.imshow(shares, cmap="OrRd", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(places, [str(s) for s in columns], fontsize=8)
    axes.set_yticks(range(len(methods)), list(methods), fontsize=7)
    axes.set_xlabel("weight versions behind", fontsize=8)
    figure.colorbar(image, label="share of runs that collapsed")
    figure.tight_layout()
    figure.savefig(HEAT_MAP, metadata={"Date": None})
    pyplot.close(figure)
