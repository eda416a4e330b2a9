"""Importance ratios in log space: token, sequence and geometric level."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plugin.ppo_utils.masked_ops import zero_masked
from plugin.sharding.sequence_shards import SequenceShards

#: exp(20) is about 4.9e8: far beyond any useful weight, far from overflow even when squared and
#: summed.
MAX_LOG_RATIO = 20.0
#: A difference of two float32 log-probs is exact to about this; band edges are inclusive up to it.
EDGE_TOLERANCE = 1e-6


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
