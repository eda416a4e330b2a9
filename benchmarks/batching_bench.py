"""How evenly and how tightly a large batch is cut.

4,096 samples with lognormal lengths (median 2,000 tokens, at most 32,768) over 64 data-parallel ranks, for several
token budgets. Everything but the time to plan is exact and repeatable.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from typing import Any

from plugin.megatron_backend.step.microbatching import (
    BatchingLimits,
    plan_microbatches,
    sample_cost,
)

SAMPLES, RANKS, LONGEST = 4096, 64, 32768
BUDGETS = (8192, 16384, 32768, 65536)


def lognormal_lengths(seed: int = 0) -> list[int]:
    """Lengths like those of reasoning rollouts: many short, a long tail cut off at the context length."""
    generator = random.Random(seed)
    draws = (int(generator.lognormvariate(math.log(2000), 0.9)) for _ in range(SAMPLES))
    return [min(LONGEST, max(64, length)) for length in draws]


def measure_batching(quick: bool = False) -> dict[str, Any]:
    """How the batch is cut at every budget."""
    lengths = lognormal_lengths()
    return {
        "samples": SAMPLES,
        "tokens": sum(lengths),
        "ranks": RANKS,
        "rows": [_row(lengths, budget) for budget in BUDGETS],
    }


def _row(lengths: list[int], budget: int) -> dict[str, Any]:
    start = time.perf_counter()
    plan = plan_microbatches(lengths, BatchingLimits(max_tokens=budget), dp_size=RANKS)
    seconds = time.perf_counter() - start
    costs = [sum(sample_cost(lengths[i]) for b in rank for i in b) for rank in plan.ranks]
    return {
        "budget": budget,
        "microbatches": plan.num_microbatches,
        "least": -(-sum(lengths) // (budget * RANKS)),
        "padding": plan.padding_share(),
        "spread": max(costs) / statistics.mean(costs),
        "seconds": seconds,
    }
