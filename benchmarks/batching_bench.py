"""How evenly and how tightly a large batch is cut: `python -m benchmarks.batching_bench`.

4,096 samples with lognormal lengths (median 2,000 tokens, at most 32,768) over 64 data-parallel ranks, for several
token budgets. Everything but the time to plan is exact and repeatable.
"""

from __future__ import annotations

import math
import random
import statistics
import time

from plugin.megatron_backend.microbatching import (
    BatchingLimits,
    MicrobatchPlan,
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


def summary(plan: MicrobatchPlan, lengths: list[int], budget: int, seconds: float) -> str:
    """One row of the table."""
    costs = [sum(sample_cost(lengths[i]) for b in rank for i in b) for rank in plan.ranks]
    spread = max(costs) / statistics.mean(costs)
    least = -(-sum(lengths) // (budget * RANKS))
    return (
        f"| {budget:,} | {plan.num_microbatches} | {least} | {plan.padding_share():.2%} | {spread:.4f} | "
        f"{seconds * 1000:.0f} |"
    )


def main() -> None:
    lengths = lognormal_lengths()
    print(f"{SAMPLES:,} samples, {sum(lengths):,} tokens, {RANKS} ranks")
    print(
        "| token budget | microbatches per rank | least possible | padding microbatches | max / mean cost | ms to plan |"
    )
    print("|---|---|---|---|---|---|")
    for budget in BUDGETS:
        start = time.perf_counter()
        plan = plan_microbatches(lengths, BatchingLimits(max_tokens=budget), dp_size=RANKS)
        print(summary(plan, lengths, budget, time.perf_counter() - start))


if __name__ == "__main__":
    main()
