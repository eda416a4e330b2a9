"""What an evaluation reports: mean@n and pass@k over prompts, with 95 % confidence intervals.

The prompts are the sample: an interval says how much a score would differ on other prompts of the
same kind. Responses to one prompt are not independent of each other and do not count on their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

#: The 97.5 % quantile of the normal distribution.
_Z = 1.959963984540054

Scores = NDArray[np.float64]


def pass_at_k(n: int, right: int, k: int) -> float:
    """Unbiased estimate that at least one of k responses is right: 1 - C(n - right, k) / C(n, k).

    n: responses that were sampled, of which `right` are right; k at most n
    """
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's score interval of a proportion of `count` trials; never leaves [0, 1]."""
    shrink = 1 + _Z**2 / count
    center = (share + _Z**2 / (2 * count)) / shrink
    half = _Z / shrink * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    # Exact at the ends, where rounding would leave a trace.
    return (
        0.0 if share == 0 else max(0.0, center - half),
        1.0 if share == 1 else min(1.0, center + half),
    )


def interval(scores: Scores) -> tuple[float, float] | None:
    """Interval of the mean of one score per prompt [P]; None if one prompt does not give any.

    Wilson's where every score is 0 or 1, so that it is right for few prompts and for scores that
    are all equal; otherwise normal, from the standard deviation between the prompts.
    """
    if bool(np.isin(scores, (0.0, 1.0)).all()):
        return wilson_interval(float(scores.mean()), len(scores))
    if len(scores) < 2:
        return None
    half = _Z * float(scores.std(ddof=1)) / math.sqrt(len(scores))
    return float(scores.mean()) - half, float(scores.mean()) + half


def evaluation_metrics(
    rewards: Sequence[Iterable[float]], *, pass_at: Sequence[int], pass_reward: float
) -> dict[str, float]:
    """`mean` and `pass@k`, each with `/ci_low` and `/ci_high`, of the rewards of every prompt.

    rewards: [P][n]; pass_at: the values of k, at most n; pass_reward: from which one is right
    """
    by_prompt = [np.asarray(list(group), np.float64) for group in rewards]
    scores = {"mean": np.array([group.mean() for group in by_prompt])}
    for k in pass_at:
        scores[f"pass@{k}"] = np.array(
            [pass_at_k(len(g), int((g >= pass_reward).sum()), k) for g in by_prompt]
        )
    metrics: dict[str, float] = {}
    for name, values in scores.items():
        metrics[name] = float(values.mean())
        bounds = interval(values)
        if bounds is not None:
            # A probability; the normal interval does not know that. Rewards may be anything.
            low, high = bounds if name == "mean" else np.clip(bounds, 0.0, 1.0).tolist()
            metrics[f"{name}/ci_low"], metrics[f"{name}/ci_high"] = low, high
    return metrics
