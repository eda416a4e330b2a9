"""Which tokens of a batch couple advantage and log-prob most, found in rounds of integer sums.

The covariance of advantage and log-prob over a batch is how fast a policy gradient step lowers the
entropy (arXiv 2505.22617), and a token's share of it is

    cov = (A - mean A) (log pi - mean log pi)

with the means over all tokens with loss. Like the thresholds in `batch_statistics`, the selection
is made before the update and is the same for every cut of the batch; so log pi is the policy at the
start of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plugin.ppo_utils.batch_statistics import of_advantages

#: Sums of 10^8 advantages or log-probs of up to 10^4 fit into 64 bits.
_FIXED_POINT = 2**20
#: Bits of an ordered float32 below those that each round distinguishes: 11, 11 and 10 of 32.
_SHIFTS = (21, 10, 0)
_LOW_32 = 0xFFFFFFFF


def covariances(log_probs: Tensor, advantages: Tensor, moments: Tensor) -> Tensor:
    """Each token's share of the covariance [n] float32; `moments`: of the batch, the first round.

    log_probs, advantages: [n]
    """
    count, of_log_probs, of_advantages = moments.tolist()
    scale = _FIXED_POINT * max(count, 1)
    of_token = advantages.double() - of_advantages / scale
    return (of_token * (log_probs.double() - of_log_probs / scale)).float()


@of_advantages
def clip_cov_rounds(values: Tensor, config: Any, known: Sequence[Tensor]) -> Tensor | None:
    """[3] int64: tokens, sums of log-probs and advantages; then [1]: tokens inside the band."""
    if not known:
        return _moments(values)
    if len(known) == 1:
        return inside_cov_band(covariances(values[0], values[1], known[0]), config).sum().reshape(1)
    return None


def clip_cov_chance(known: Sequence[Tensor], config: Any) -> float:
    """The share of the tokens inside the band that is dropped; at least one token of a batch."""
    count, eligible = int(known[0][0]), int(known[1])
    return min(1.0, _at_least_one(count, config.clip_cov_ratio) / max(eligible, 1))


def inside_cov_band(covariance: Tensor, config: Any) -> Tensor:
    """bool [n]: clip_cov_low < covariance < clip_cov_high."""
    return (covariance > config.clip_cov_low) & (covariance < config.clip_cov_high)


@of_advantages
def kl_cov_rounds(values: Tensor, config: Any, known: Sequence[Tensor]) -> Tensor | None:
    """[3] int64: tokens and sums; then [bins] int64: tokens by the next bits of the covariance."""
    if not known:
        return _moments(values)
    rounds = len(known) - 1
    if rounds == len(_SHIFTS):
        return None
    keys = _ordered(covariances(values[0], values[1], known[0]))
    if rounds:
        keys = keys[(keys >> _SHIFTS[rounds - 1]) == _leading_bits(known, config)]
    width = 1 << ((32 if rounds == 0 else _SHIFTS[rounds - 1]) - _SHIFTS[rounds])
    return torch.bincount((keys >> _SHIFTS[rounds]) & (width - 1), minlength=width)


def among_largest(covariance: Tensor, known: Sequence[Tensor], config: Any) -> Tensor:
    """bool [n]: the kl_cov_ratio largest covariances of the batch, at least one; equal ones too."""
    return _ordered(covariance) >= _leading_bits(known, config)


def hashed_uniform(*values: Tensor) -> Tensor:
    """[n] float64 in [0, 1) that follow from each token's own float32 numbers alone.

    A generator would give a token another number for every cut of the batch.
    """
    mixed = torch.full(values[0].shape, 0x9E3779B9, dtype=torch.int64, device=values[0].device)
    for value in values:
        mixed = mixed ^ (_bits(value) & _LOW_32)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            mixed = ((mixed ^ (mixed >> shift)) * factor) & _LOW_32
        mixed = mixed ^ (mixed >> 16)
    return mixed.double() / 2**32


def _moments(values: Tensor) -> Tensor:
    count = torch.full((1,), values.shape[1], dtype=torch.int64, device=values.device)
    return torch.cat([count, (values.double() * _FIXED_POINT).round().long().sum(1)])


def _leading_bits(known: Sequence[Tensor], config: Any) -> int:
    """Leading bits of the key of the last of the largest covariances, as far as it is known."""
    left = _at_least_one(int(known[0][0]), config.kl_cov_ratio)
    prefix = 0
    for table in known[1:]:
        above = table.flip(0).cumsum(0)
        place = int((above < left).sum())  # from the top: bins that do not reach so far
        place = min(place, len(table) - 1)
        left -= int(above[place]) - int(table.flip(0)[place])
        prefix = prefix * len(table) + len(table) - 1 - place
    return prefix


def _at_least_one(count: int, share: float) -> int:
    return max(int(count * share), 1)


def _ordered(values: Tensor) -> Tensor:
    """[n] int64 of 32 bits in the order of the float32 values."""
    bits = _bits(values) & _LOW_32
    return torch.where(bits >> 31 == 1, _LOW_32 - bits, bits + (1 << 31))


def _bits(values: Tensor) -> Tensor:
    return (values.float() + 0.0).view(torch.int32).long()  # -0.0 becomes 0.0
