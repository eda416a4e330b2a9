"""Where the time of the kernels goes: each pass, and the least that memory and arithmetic would take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.workers import run_in_ranks
from plugin.logprobs.kernels import RowNormalizer, row_kernels_for

THREADS = 2
_BLOCK = 1 << 16  # float32 values that stay in a core's cache


def measure_profile(quick: bool) -> dict[str, Any]:
    """Seconds of every pass and of its lower bounds on the shape of the targets."""
    shape = (64, 20_000) if quick else (384, 151_936)
    return run_in_ranks(
        _measure, (*shape, 3 if quick else 9), ranks=1, threads=THREADS, seconds=900
    )


def _measure(group: dist.ProcessGroup, rows: int, columns: int, repeats: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, columns, generator=generator).mul_(2.5)
    targets = torch.randint(columns, (rows,), generator=generator)
    into = torch.empty_like(logits).copy_(logits)
    kernels = row_kernels_for(logits)
    statistics = kernels.forward_blocks(logits, targets, scale=1.0, with_entropy=True)
    assert statistics.weighted_sum is not None
    entropy = statistics.sum_exp.log() - statistics.weighted_sum / statistics.sum_exp
    normalizer = RowNormalizer(statistics.maximum, statistics.sum_exp, entropy)
    grads = torch.randn(2, rows, generator=generator)

    def forward(with_entropy: bool) -> Callable[[], object]:
        return lambda: kernels.forward_blocks(logits, targets, scale=1.0, with_entropy=with_entropy)

    def backward(
        on_entropy: torch.Tensor | None, out: Callable[[], torch.Tensor]
    ) -> Callable[[], object]:
        return lambda: kernels.backward_blocks(
            logits, targets, normalizer, grads[0], on_entropy, scale=1.0, out=out()
        )

    passes: dict[str, Callable[[], object]] = {
        "forward, log-prob": forward(False),
        "forward, log-prob and entropy": forward(True),
        "backward into a buffer that exists": backward(None, lambda: into),
        "backward with entropy, into a buffer that exists": backward(grads[1], lambda: into),
        "backward with entropy, into fresh memory": backward(
            grads[1], lambda: torch.empty_like(logits)
        ),
        "bound: read the logits once (maximum of all)": lambda: logits.max(),
        "bound: copy the logits into a buffer that exists": lambda: into.copy_(logits),
        "bound: copy the logits into fresh memory": lambda: torch.empty_like(logits).copy_(logits),
        "bound: one exponential per logit, in cache (torch)": _exponentials(rows * columns),
    }
    seconds = dict.fromkeys(passes, float("inf"))
    for _ in range(repeats):
        for name, action in passes.items():
            start = time.perf_counter()
            action()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return {"rows": rows, "columns": columns, "kernels": kernels.name, "seconds": seconds}


def _exponentials(count: int) -> Callable[[], object]:
    values, out = torch.randn(_BLOCK), torch.empty(_BLOCK)

    def run() -> None:
        for _ in range(max(1, count // _BLOCK)):
            torch.exp(values, out=out)

    return run
