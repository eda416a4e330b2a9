"""Draw docs/images/architecture.svg, the data flow of a job: `python -m docs.draw_architecture [FILE]`."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "architecture"
from matplotlib import pyplot  # noqa: E402
from matplotlib.patches import FancyBboxPatch  # noqa: E402

FIGURE = Path(__file__).parent / "images" / "architecture.svg"
TEAL, BLUE, YELLOW, PURPLE = "#e6fffa", "#ebf8ff", "#fffff0", "#faf5ff"
EDGE, ARROW, GRAY = "#4a5568", "#2b6cb0", "#718096"

#: x, y, width, height, color, title, lines; y grows downward.
BOXES = (
    (30, 46, 165, 112, TEAL, "prompt", ("tasks/", "controller/queue/")),
    (255, 46, 185, 112, TEAL, "engine", ("engines/, environments/", "tokens, rollout_log_probs,", "routes")),
    (500, 46, 170, 112, TEAL, "reward", ("rewards/, teachers/", "scored while others", "are generated")),
    (730, 46, 250, 112, BLUE, "batch", ("controller/batch", "advantages, checks", "controller/passes.py: log-prob passes")),
    (1040, 46, 116, 112, PURPLE, "observe/", ("run files,", "detectors,", "report")),
    (800, 250, 180, 104, BLUE, "microbatches", ("megatron_backend/step/", "token budget, packing,", "padding is a flag")),
    (545, 250, 195, 104, YELLOW, "model", ("stock Megatron-Core", "megatron_backend/model/", "routing/ replay")),
    (290, 250, 195, 104, YELLOW, "log-probs", ("logprobs/", "vocabulary-parallel,", "LM head without logits")),
    (30, 250, 200, 104, YELLOW, "tokens", ("loss/inputs", "cur, train, rollout [T]")),
    (30, 420, 200, 108, YELLOW, "policy loss", ("loss/policy_losses", "one small function each")),
    (290, 420, 195, 108, YELLOW, "corrections", ("loss/hook_chain", "ppo_utils/corrections", "weight, keep, metrics")),
    (545, 420, 195, 108, YELLOW, "objective", ("loss/objective", "policy + regularizers,", "one denominator")),
    (800, 420, 180, 108, YELLOW, "gradient", ("step/loss_scaling", "DDP, optimizer")),
    (1040, 250, 116, 278, PURPLE, "metrics", ("sums, counts,", "maxima", "", "one packed", "reduction", "", "same on", "every rank")),
)  # fmt: skip
#: Corners of an arrow, and its label with the place where it stands.
ARROWS: tuple[tuple[tuple[tuple[int, int], ...], str, tuple[int, int]], ...] = (
    (((195, 102), (255, 102)), "", (0, 0)),
    (((440, 102), (500, 102)), "", (0, 0)),
    (((670, 102), (730, 102)), "", (0, 0)),
    (((980, 102), (1040, 102)), "", (0, 0)),
    (((890, 158), (890, 250)), "one share per DP rank", (968, 222)),
    (((800, 302), (740, 302)), "", (0, 0)),
    (((545, 302), (485, 302)), "hidden", (515, 294)),
    (((290, 302), (230, 302)), "", (0, 0)),
    (((130, 354), (130, 420)), "", (0, 0)),
    (((230, 474), (290, 474)), "", (0, 0)),
    (((485, 474), (545, 474)), "", (0, 0)),
    (((740, 474), (800, 474)), "scalar", (770, 466)),
    (((980, 474), (1040, 474)), "", (0, 0)),
    (((1098, 250), (1098, 158)), "", (0, 0)),
)
WEIGHTS = ((890, 528), (890, 548), (18, 548), (18, 226), (347, 226), (347, 158))


def draw(file: Path) -> None:
    """Write the figure."""
    figure, axes = pyplot.subplots(figsize=(11.8, 5.7))
    figure.subplots_adjust(0, 0, 1, 1)
    axes.set_xlim(0, 1180)
    axes.set_ylim(570, 0)
    axes.axis("off")
    for y, height, label, x in (
        (8, 180, "driver (controller/) and Ray actors (cluster/)", 22),
        (204, 358, "every trainer rank", 400),
    ):
        _box(axes, 8, y, 1164, height, "#f7fafc", "#cbd5e0")
        axes.text(x, y + 20, label, fontsize=9, color=GRAY)
    for x, y, width, height, color, title, lines in BOXES:
        _box(axes, x, y, width, height, color, EDGE)
        axes.text(x + width / 2, y + 24, title, fontsize=11, weight="bold", ha="center")
        for i, line in enumerate(lines):
            axes.text(x + width / 2, y + 47 + 19 * i, line, fontsize=8.5, ha="center")
    for corners, label, (x, y) in ARROWS:
        _arrow(axes, corners, "solid")
        axes.text(x, y, label, fontsize=8.5, color=ARROW, ha="center")
    _arrow(axes, WEIGHTS, (0, (4, 3)))
    axes.text(
        520, 543, "weights/: new weights, with a version", fontsize=8.5, color=ARROW, ha="center"
    )
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None, dpi=110)
    pyplot.close(figure)


def _box(
    axes: pyplot.Axes, x: float, y: float, width: float, height: float, color: str, edge: str
) -> None:
    shape = FancyBboxPatch(
        (x, y),
        width,
        height,
        boxstyle="round,pad=0,rounding_size=8",
        facecolor=color,
        edgecolor=edge,
    )
    axes.add_patch(shape)


def _arrow(axes: pyplot.Axes, corners: tuple[tuple[int, int], ...], style: object) -> None:
    xs, ys = zip(*corners, strict=True)
    axes.plot(xs[:-1], ys[:-1], color=ARROW, linewidth=1.6, linestyle=style)
    look = {
        "arrowstyle": "-|>",
        "color": ARROW,
        "linewidth": 1.6,
        "linestyle": style,
        "shrinkA": 0,
        "shrinkB": 0,
    }
    axes.annotate("", xy=corners[-1], xytext=corners[-2], arrowprops=look)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FIGURE)
