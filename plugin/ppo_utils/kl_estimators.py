"""Per-token estimators of a KL divergence from the log-probs of one sampled token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from plugin.errors import ConfigError
from plugin.ppo_utils.importance_ratio import MAX_LOG_RATIO, log_ratio
from plugin.ppo_utils.masked_ops import zero_masked

#: slime bounds its low_var_kl here, after the weight of --use-unbiased-kl.
LOW_VAR_KL_BOUND = 10.0
#: A binary KL is of probabilities at least this far from 0 and 1, as in verl.
PROBABILITY_EDGE = 1e-6


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
