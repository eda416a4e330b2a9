"""One layer's attention over packed rows by their number of samples: `python -m benchmarks.packed_attention [--figure FILE]`.

Forward and backward with SmolLM2's heads, samples of about 67 tokens. Dense: one mask over all pairs of the row. By
sample: `plugin.megatron_backend.model.packed_attention`. The two take turns; the least seconds of several count. With
--longest one sample of so many tokens instead, once, with the memory that the pass takes; no dense mask is made.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import peak_extra_bytes
from plugin.megatron_backend.model.packed_attention import PackedLayout

SAMPLES = (1, 2, 4, 8, 16, 32, 64)
HEADS, GROUPS, DIM = 9, 3, 64
KERNEL = partial(F.scaled_dot_product_attention, enable_gqa=True)


def main() -> None:
    """Measure, print Markdown, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--longest", type=int, help="tokens of one long sample")
    options = parser.parse_args()
    if options.longest is not None:
        print(_long_sample(options.longest))
        return
    rows = [(count, *_least_seconds(count)) for count in SAMPLES]
    print("| samples | tokens | dense, ms | by sample, ms |\n|---|---|---|---|")
    for count, tokens, dense, by_sample in rows:
        print(f"| {count} | {tokens} | {1000 * dense:.1f} | {1000 * by_sample:.1f} |")
    if options.figure is not None:
        _draw(rows, options.figure)


def _row(layout: PackedLayout) -> list[Tensor]:
    """Queries, keys and values of a row."""
    return [
        torch.randn(len(layout.positions), heads, DIM, requires_grad=True)
        for heads in (HEADS, GROUPS, GROUPS)
    ]


def _long_sample(tokens: int) -> str:
    """Seconds and memory of a pass over one sample, beside the memory of its mask."""
    layout = PackedLayout.from_lengths([tokens])
    row = _row(layout)
    began = time.process_time()
    used = peak_extra_bytes(lambda: layout.batches.attend(*row, KERNEL).sum().backward())
    inputs = sum(x.nbytes for x in row)
    return (
        f"{tokens} tokens: {time.process_time() - began:.1f} processor s, "
        f"{used / 2**20:.0f} MiB beside {inputs / 2**20:.0f} of queries, keys and values; a mask of "
        f"the row would have {tokens**2 / 2**20:.0f} MiB, float scores {4 * HEADS * tokens**2 / 2**20:.0f}"
    )


def _least_seconds(count: int) -> tuple[int, float, float]:
    """Tokens of the row; seconds of the dense mask, and by sample."""
    lengths = np.round(67 * np.linspace(0.8, 1.2, count)).astype(int)
    layout = PackedLayout.from_lengths(lengths)
    same = layout.sample_ids[:, None] == layout.sample_ids[None]
    visible = same & (layout.positions[None] <= layout.positions[:, None])
    parts = _row(layout)

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
