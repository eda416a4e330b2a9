"""Log-ratios of two policies, and what is made of them: importance ratios and KL estimators."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from plugin.errors import ConfigError
from plugin.ppo_utils.masked_ops import zero_masked
from plugin.sharding.sequence_shards import SequenceShards

#: exp(20) is about 4.9e8: far beyond any useful weight, far from overflow even when squared and
#: summed.
MAX_LOG_RATIO = 20.0
#: A difference of two float32 log-probs is exact to about this; band edges are inclusive up to it.
EDGE_TOLERANCE = 1e-6
#: slime bounds its low_var_kl here, after the weight of --use-unbiased-kl.
LOW_VAR_KL_BOUND = 10.0
#: A binary KL is of probabilities at least this far from 0 and 1, as in verl.
PROBABILITY_EDGE = 1e-6


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """log(numerator / denominator) [T] in float32 from log-probs, 0 where masked."""
    return zero_masked(numerator, mask) - zero_masked(denominator, mask)


def safe_exp(log_values: Tensor, cap: float = MAX_LOG_RATIO) -> Tensor:
    """exp bounded to [exp(-cap), exp(cap)]; the gradient is 0 outside the bounds."""
    return log_values.clamp(-cap, cap).exp()


def log_bound(bound: float) -> float:
    """log of a ratio bound; 0 and negative bounds mean no bound below."""
    return math.log(bound) if bound > 0 else -math.inf


def inside_band(log_values: Tensor, low: float, high: float) -> Tensor:
    """bool [T]: low <= exp(log_values) <= high, edges included, decided in log space."""
    values = log_values.detach()
    return (values >= log_bound(low) - EDGE_TOLERANCE) & (
        values <= log_bound(high) + EDGE_TOLERANCE
    )


def clipped_ratio(log_values: Tensor, low: float, high: float) -> Tensor:
    """clip(exp(log_values), low, high), without ever forming an infinite ratio."""
    return safe_exp(log_values).clamp(low, high)


def effective_sample_size(total: float, squares: float) -> float:
    """(sum w)^2 / sum w^2 from the two sums; 0 where every weight is 0."""
    return total * total / squares if squares > 0 else 0.0


def sequence_log_ratio(token_log_ratio: Tensor, shards: SequenceShards) -> Tensor:
    """Sum over each whole sequence of the masked token log-ratios [T] -> [N]; no gradient."""
    return shards.sequence_sums(token_log_ratio)[0]


def geometric_log_ratio(token_log_ratio: Tensor, mask: Tensor, shards: SequenceShards) -> Tensor:
    """Mean over each sequence's unmasked tokens of the token log-ratios [T] -> [N]; no gradient."""
    total, count = shards.sequence_sums(token_log_ratio, mask)
    return total / count.clamp(min=1)


def probability_difference(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """exp(numerator) - exp(denominator) [T] from log-probs, 0 where masked; no gradient."""
    with torch.no_grad():
        first, second = zero_masked(numerator, mask), zero_masked(denominator, mask)
        return first.clamp(max=0.0).exp() - second.clamp(max=0.0).exp()


def k1(difference: Tensor) -> Tensor:
    """d: unbiased, signed, high variance."""
    return difference


def absolute(difference: Tensor) -> Tensor:
    """|d|: a bounded-slope penalty."""
    return difference.abs()


def k2(difference: Tensor) -> Tensor:
    """d^2 / 2: its gradient is d times the score."""
    return difference.square() / 2


def k3(difference: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased and never negative; bounded in log space."""
    bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1 keeps the small values exact: exp(-d) - 1 loses them to cancellation.
    return torch.expm1(-bounded) + bounded


def low_var_kl(difference: Tensor) -> Tensor:
    """k3, at most `LOW_VAR_KL_BOUND` per token."""
    return k3(difference).clamp(max=LOW_VAR_KL_BOUND)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
    "low_var_kl": low_var_kl,
}


def kl_estimate(log_probs: Tensor, base_log_probs: Tensor, mask: Tensor, kind: str) -> Tensor:
    """KL per token [T], d = log_probs - base_log_probs, exactly 0 where masked."""
    if kind not in KL_ESTIMATORS:
        raise ConfigError(f"KL estimator {kind!r}; choose one of {', '.join(KL_ESTIMATORS)}")
    return KL_ESTIMATORS[kind](log_ratio(log_probs, base_log_probs, mask))


def binary_kl(log_probs: Tensor, other_log_probs: Tensor, mask: Tensor) -> Tensor:
    """KL [T] of the coins (p, 1 - p) and (q, 1 - q), from the log-probs of p and q; no gradient.

    Probabilities stay `PROBABILITY_EDGE` away from 0 and 1, so that it is finite; 0 where masked.
    """
    with torch.no_grad():
        p, q = (
            zero_masked(values, mask).double().exp().clamp(PROBABILITY_EDGE, 1 - PROBABILITY_EDGE)
            for values in (log_probs, other_log_probs)
        )
        return (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).float()
