"""From `data.json` to the table and the figure in the docs; nothing there is written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import fill
from typing import Any

from benchmarks.marked_pages import write_marked
from benchmarks.precision.pairs import DTYPES

DATA = Path(__file__).with_name("data.json")
DOCS = Path(__file__).parents[2] / "docs"
PAGE, FIGURE = DOCS / "precision.md", DOCS / "images/precision_pairs.svg"
MARK = "precision pairs"
_COLUMNS = {
    "abs_log_ratio": "mean \\|log-ratio\\|",
    "ratio_max": "largest ratio",
    "ess_share": "ESS/N, tokens",
    "sequence_abs_log_ratio": "mean \\|log-ratio\\| of a sequence",
    "sequence_ess_share": "ESS/N, sequences",
}


def table(data: dict[str, Any]) -> str:
    """Markdown: a line about the model, then one row per pair."""
    rows = data["pairs"]
    tokens, surprise = rows[0]["tokens"], rows[0]["surprise"]
    sequences = tokens / data["response_length"]
    lines = [
        fill(
            f"{sequences:.0f} sequences of {data['response_length']} sampled tokens per pair; mean "
            f"surprise of a sampled token {surprise:.2f} nats, after the LM head was multiplied by "
            f"{data['head']:.1f}; mismatch KL is k3 ± its standard error over sequences.",
            100,
        )
        + "\n",
        f"| trainer | engine | mismatch KL | {' | '.join(_COLUMNS.values())} |",
        "|---" * (3 + len(_COLUMNS)) + "|",
    ]
    for row in rows:
        cells = [f"{row['k3']:.1e} ± {row['k3_error']:.0e}"]
        cells += [_cell(name, row[name]) for name in _COLUMNS]
        lines.append(f"| {row['trainer']} | {row['engine']} | {' | '.join(cells)} |")
    by_pair = {(row["trainer"], row["engine"]): row for row in rows}
    bf16, fp16 = (by_pair[name, name] for name in ("bfloat16", "float16"))
    lines += [
        "",
        fill(
            f"bfloat16/bfloat16 against float16/float16: {bf16['k3'] / fp16['k3']:.0f} times the "
            f"mismatch KL, {bf16['abs_log_ratio'] / fp16['abs_log_ratio']:.1f} times the mean "
            "absolute log-ratio.",
            100,
        ),
    ]
    return "\n".join(lines)


def _cell(name: str, value: float) -> str:
    return f"{value:.4f}" if name.endswith("ess_share") else f"{value:.2g}" if value < 1 else f"{value:.3g}"  # fmt: skip


def read() -> dict[str, Any]:
    """What was measured last."""
    found: dict[str, Any] = json.loads(DATA.read_text())
    return found


def write_summary() -> None:
    """Write the table into the page, and the figure beside it."""
    data = read()
    write_marked(PAGE, MARK, table(data))
    draw(data["pairs"])


def draw(rows: list[dict[str, Any]]) -> None:
    """Mismatch KL on a logarithmic axis, one group of bars per trainer."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "precision"
    from matplotlib import pyplot

    by_pair = {(row["trainer"], row["engine"]): row["k3"] for row in rows}
    colors = dict(zip(DTYPES, ("#8a939b", "#d1495b", "#1f6fb4"), strict=True))
    figure, axes = pyplot.subplots(figsize=(6.4, 3.2))
    for place, engine in enumerate(DTYPES):
        values = [by_pair[trainer, engine] for trainer in DTYPES]
        places = [number + 0.26 * (place - 1) for number in range(len(DTYPES))]
        axes.bar(places, values, 0.24, label=f"{engine} engine", color=colors[engine])
    axes.set_yscale("log")
    axes.set_xticks(range(len(DTYPES)), [f"{name} trainer" for name in DTYPES])
    axes.set_ylabel("mismatch KL (k3) per token")
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(FIGURE, metadata={"Date": None})
    pyplot.close(figure)
