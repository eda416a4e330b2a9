"""From `data.json` to the tables and the figure in the docs; nothing there is written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.marked_pages import write_marked
from benchmarks.real_mismatch.measure import DATA

DOCS = Path(__file__).parents[2] / "docs"
PAGE, FIGURE = DOCS / "precision.md", DOCS / "images/real_mismatch.svg"
MARK = "real mismatch"
_COLUMNS = {
    "abs_log_ratio": "mean \\|d\\|",
    "multiplicative_error": "multiplicative error",
    "largest_ratio": "largest ratio",
    "ess_share": "ESS/N, tokens",
    "sequence_ess_share": "ESS/N, sequences",
    "outside_20_percent": "outside 0.8 to 1.2",
    "outside_factor_2": "outside 0.5 to 2",
}
_SHARES = ("multiplicative_error", "outside_20_percent", "outside_factor_2")
#: Of the figure: engine, trainer, label.
_LINES = (
    ("transformers, bfloat16, int4", "bfloat16", "transformers, 4-bit weights"),
    ("transformers, bfloat16, int8", "bfloat16", "transformers, 8-bit weights"),
    ("vllm, bfloat16", "bfloat16", "vLLM, bfloat16"),
    ("transformers, bfloat16", "bfloat16", "transformers, bfloat16"),
    (
        "transformers, bfloat16",
        "its own prefill",
        "transformers, bfloat16, against its own prefill",
    ),
    ("transformers, float16", "float16", "transformers and trainer in float16"),
)


def tables(data: dict[str, Any]) -> str:
    """Markdown: a row per pair, then what company changes."""
    lines = [
        f"{data['prompts']} responses of at most {data['length']} tokens per engine; d is the "
        "difference of log-probs,\nmismatch KL is k3 ± its standard error over sequences.\n",
        f"| engine | trainer | tokens | mismatch KL | {' | '.join(_COLUMNS.values())} |",
        "|---" * (4 + len(_COLUMNS)) + "|",
    ]
    for row in data["rows"]:
        trainer = row["trainer"]
        if "replay" in row:
            trainer += ", kept ids replayed" if row["replay"] else ", kept ids ignored"
        cells = " | ".join(_cell(name, row[name]) for name in _COLUMNS)
        kl = f"{row['k3']:.1e} ± {row['k3_error']:.0e}"
        lines.append(f"| {row['engine']} | {trainer} | {row['tokens']} | {kl} | {cells} |")
    lines += [
        "\nThe same prompts and seeds beside the others and one at a time, compared up to the\n"
        "first token that differs:\n",
        "| engine | responses with the same tokens | mean \\|difference\\| | largest | bitwise equal |",
        "|---|---|---|---|---|",
    ]
    for row in data["company"]:
        lines.append(
            f"| {row['engine'].rpartition(',')[0]} | {row['same_tokens']} of {row['responses']} "
            f"| {row['abs_difference']:.1e} | {row['largest_difference']:.1e} "
            f"| {row['bitwise_equal']:.0%} |"
        )
    return "\n".join(lines)


def _cell(name: str, value: float) -> str:
    if name in _SHARES:
        return f"{value:.2%}" if value >= 1e-4 or value == 0 else f"{value:.0e}"
    return f"{value:.4f}" if name.endswith("ess_share") else f"{value:.2g}" if value < 1 else f"{value:.3g}"  # fmt: skip


def read() -> dict[str, Any]:
    """What was measured last."""
    found: dict[str, Any] = json.loads(DATA.read_text())
    return found


def write_summary() -> None:
    """Write the tables into the page, and the figure beside it."""
    data = read()
    write_marked(PAGE, MARK, tables(data))
    draw(data["rows"])


def draw(rows: list[dict[str, Any]]) -> None:
    """Mean |d| by position in the response, and by the policy's entropy."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "real mismatch"
    from matplotlib import pyplot

    by_pair = {(row["engine"], row["trainer"]): row for row in rows}
    colors = ("#d1495b", "#edae49", "#1f6fb4", "#2e8b57", "#8a939b", "#6a4c93")
    figure, axes = pyplot.subplots(1, 2, figsize=(9.0, 3.6), sharey=True)
    for what, panel, label in zip(
        ("position", "entropy"),
        axes,
        ("position in the response, from", "entropy of the next token in nats, from"),
        strict=True,
    ):
        starts: list[float] = []
        for color, (engine, trainer, name) in zip(colors, _LINES, strict=True):
            bins = by_pair[engine, trainer][f"by_{what}"]
            starts = [one["from"] for one in bins]
            panel.plot(range(len(bins)), [one["abs"] for one in bins], "o-", color=color, label=name, lw=1.4, ms=3.5)  # fmt: skip
        panel.set_xticks(range(len(starts)), [f"{start:g}" for start in starts])
        panel.set_yscale("log")
        panel.set_xlabel(label)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("mean |d| per token")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=3, fontsize=8, frameon=False)  # fmt: skip
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    figure.savefig(FIGURE, metadata={"Date": None})
    pyplot.close(figure)
