"""The figure of whole steps and the text around it in `docs/performance.md`, from `results.json`.

    python -m benchmarks.job_figure

Without a full measurement of the parts `jobs` and `job-growth` nothing is written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from textwrap import fill
from typing import Any

from benchmarks.marked_pages import write_marked
from benchmarks.peer_environment import ROOT
from benchmarks.report import phase_shares

RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "performance.md"
IMAGE = "images/step_cost.svg"


def draw(jobs: dict[str, Any], growth: dict[str, Any], file: Path) -> None:
    """Left: a step's phases in units of TRL's step. Right: what a sample and a rank cost as they become more."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (steps, samples, ranks) = pyplot.subplots(
        1, 3, figsize=(13, 4.2), width_ratios=(2.2, 1, 1)
    )
    rows = [
        (row, next(r["seconds"] for r in case["rows"] if r["kind"] == "TRL"), place, case)
        for place, case in enumerate(jobs["sizes"])
        for row in case["rows"]
    ]
    colors: dict[str, Any] = {}
    for number, (row, unit, place, _) in enumerate(rows):
        left = 0.0
        for phase, share in phase_shares(row).items():
            width = share * row["seconds"] / unit
            new = phase not in colors
            bar = steps.barh(
                -number - 0.6 * place,
                width,
                left=left,
                color=colors.get(phase),
                label=phase if new else None,
            )
            colors.setdefault(phase, bar[0].get_facecolor())
            left += width
    steps.set_yticks(
        [-number - 0.6 * place for number, (_, _, place, _) in enumerate(rows)],
        [f"{case['size']['name']}: {row['kind']}" for row, _, _, case in rows],
        fontsize=8,
    )
    steps.axvline(1.0, color="black", linewidth=0.8)
    steps.set_xlabel("time of a step, TRL = 1")
    steps.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.13), ncols=len(colors))
    by_axis = {
        axis: [row for row in growth["driver"] if row["axis"] == axis]
        for axis in ("samples", "ranks")
    }
    for name in ("preparing", "cutting"):
        values = [row[name] / row["samples"] * 1e6 for row in by_axis["samples"]]
        samples.plot([row["samples"] for row in by_axis["samples"]], values, "o-", label=name)
    samples.set_xscale("log")
    places = [row["samples"] for row in by_axis["samples"]]
    samples.set_xticks(places, [f"{place:,}" for place in places], fontsize=7)
    samples.minorticks_off()
    samples.set_ylim(bottom=0)
    samples.set_xlabel("samples")
    samples.set_title("driver, microseconds per sample", fontsize=9)
    counts = [row["ranks"] for row in by_axis["ranks"]]
    for name, title in {"rank_bytes": "bytes of a rank", "rank": "seconds of a rank"}.items():
        first = by_axis["ranks"][0][name]
        ranks.plot(counts, [row[name] / first for row in by_axis["ranks"]], "o-", label=title)
    ranks.plot(counts, [1 / count for count in counts], ":", color="gray", label="1 / ranks")
    ranks.set_xscale("log")
    ranks.set_xticks(counts, [str(count) for count in counts])
    ranks.minorticks_off()
    ranks.set_yscale("log")
    ranks.set_xlabel("data-parallel ranks")
    ranks.set_title("a rank's part, one rank = 1", fontsize=9)
    for axes in (samples, ranks):
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def describe(jobs: dict[str, Any], growth: dict[str, Any], made: str) -> str:
    """The figure, how fast a step is in units of TRL's, and what takes the longest."""
    lines = [
        f"![Left: time of a step by phase, in units of TRL's. Right: cost per sample on the driver, and a rank's part of the batch]({IMAGE})\n",
        fill(
            f"Measured {made} on {jobs['cores']} cores; *speed* is TRL's time divided by ours, medians of whole steps.",
            100,
        )
        + "\n",
        "| model | samples x response | synchronous | longest phase | rank per core | longest phase | asynchronous | longest phase |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in jobs["sizes"]:
        size, rows = case["size"], {row["kind"]: row for row in case["rows"]}
        cells = []
        for kind in ("synchronous", "rank per core", "asynchronous"):
            shares = phase_shares(rows[kind])
            longest = max(shares, key=lambda phase: shares[phase])
            speed = rows["TRL"]["seconds"] / rows[kind]["seconds"]
            cells.append(f"{speed:.2f}x | {longest} {shares[longest]:.0%}")
        samples = size["prompts"] * jobs["samples_per_prompt"]
        lines.append(f"| {size['name']} | {samples} x {size['response']} | {' | '.join(cells)} |")
    driver = [row for row in growth["driver"] if row["axis"] == "samples"]
    few, many = driver[0], driver[-1]
    over = [row for row in growth["driver"] if row["axis"] == "ranks"]
    lines.append(
        "\n"
        + fill(
            f"Preparing a batch takes {few['preparing'] / few['samples'] * 1e6:.0f} microseconds per sample at {few['samples']:,} samples and "
            f"{many['preparing'] / many['samples'] * 1e6:.1f} at {many['samples']:,}. Of {over[0]['samples']:,} samples one of {over[-1]['ranks']} "
            f"ranks gets {over[-1]['rank_bytes'] / over[0]['rank_bytes']:.1%} of the bytes that a single rank gets.",
            100,
        )
    )
    return "\n".join(lines)


def main() -> int:
    """Write figure and text, or say what is missing."""
    measured = json.loads(RESULTS.read_text())
    parts = {name: measured.get(name) for name in ("jobs", "job-growth")}
    missing = [name for name, part in parts.items() if part is None or part["quick"]]
    if missing or parts["jobs"]["data"]["absent"]:
        what = ", ".join(missing) or parts["jobs"]["data"]["absent"][0]
        print(f"no full measurement of {what}: make bench-jobs")
        return 1
    jobs, growth = (part["data"] for part in parts.values())
    draw(jobs, growth, PAGE.parent / IMAGE)
    write_marked(PAGE, "step cost", describe(jobs, growth, parts["jobs"]["made"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
