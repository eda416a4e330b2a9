"""One layer's attention over packed rows by their number of samples: `python -m benchmarks.packed_attention [FIGURE]`.

Forward and backward with SmolLM2's heads, samples of about 67 tokens. Dense: one mask over all pairs of the row. By
sample: `plugin.megatron_backend.model.packed_attention`. The two take turns; the least seconds of several count.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from plugin.megatron_backend.model.packed_attention import PackedLayout

SAMPLES = (1, 2, 4, 8, 16, 32, 64)
HEADS, GROUPS, DIM = 9, 3, 64
KERNEL = partial(F.scaled_dot_product_attention, enable_gqa=True)


def main() -> None:
    """Measure, print Markdown, and draw."""
    rows = [(count, *_least_seconds(count)) for count in SAMPLES]
    print("| samples | tokens | dense, ms | by sample, ms |\n|---|---|---|---|")
    for count, tokens, dense, by_sample in rows:
        print(f"| {count} | {tokens} | {1000 * dense:.1f} | {1000 * by_sample:.1f} |")
    if len(sys.argv) > 1:
        _draw(rows, Path(sys.argv[1]))


def _least_seconds(count: int) -> tuple[int, float, float]:
    """Tokens of the row; seconds of the dense mask, and by sample."""
    lengths = np.round(67 * np.linspace(0.8, 1.2, count)).astype(int)
    layout = PackedLayout.from_lengths(lengths)
    same = layout.sample_ids[:, None] == layout.sample_ids[None]
    visible = same & (layout.positions[None] <= layout.positions[:, None])
    parts = [
        torch.randn(len(layout.positions), heads, DIM, requires_grad=True)
        for heads in (HEADS, GROUPS, GROUPS)
    ]

    def dense() -> Tensor:
        q, k, v = (x[None].transpose(1, 2) for x in parts)
        return KERNEL(q, k, v, attn_mask=visible)

    def by_sample() -> Tensor:
        return layout.batches.attend(parts[0], parts[1], parts[2], KERNEL)

    found: dict[Callable[[], Tensor], list[float]] = {dense: [], by_sample: []}
    for _ in range(5):
        for attend, seconds in found.items():
            start = time.perf_counter()
            attend().sum().backward()
            seconds.append(time.perf_counter() - start)
    return len(layout.positions), min(found[dense]), min(found[by_sample])


def _draw(rows: list[tuple[int, int, float, float]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6))
    tokens = [row[1] for row in rows]
    axes.loglog(tokens, [1000 * row[2] for row in rows], "o-", label="dense mask of the row")
    axes.loglog(tokens, [1000 * row[3] for row in rows], "o-", label="by sample")
    first = 1000 * rows[0][3] / tokens[0]
    axes.loglog(tokens, [first * t for t in tokens], ":", color="gray", label="linear")
    axes.set_xlabel("tokens of a packed row (samples of 67)")
    axes.set_ylabel("ms, forward and backward, one layer")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file)


if __name__ == "__main__":
    main()
