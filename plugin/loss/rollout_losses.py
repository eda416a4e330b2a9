"""Policy losses that compare the current policy with the one that sampled: cur against rollout.

They account for mismatch and staleness by themselves: with `--use-tis` they accept only masks.
Notation and layout of the docstrings as in `policy_losses`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from plugin.config import LossConfig
from plugin.loss.interfaces import LossInputs, PolicyTerm
from plugin.ppo_utils.correction_interface import token_separable
from plugin.ppo_utils.importance_ratio import (
    EDGE_TOLERANCE,
    MAX_LOG_RATIO,
    binary_kl,
    inside_band,
    log_bound,
    log_ratio,
    probability_difference,
    safe_exp,
    sequence_log_ratio,
)

#: A sequence weight is not followed below this: its logarithm grows with the length.
_SMALLEST_SEQUENCE_RATIO = 1e-8


@token_separable
def icepop(inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    """Importance ratio against the rollout policy inside a band; outside, drop the token.

    loss = -keep A r, r = exp(cur - rollout), keep = icepop_ratio_low <= r <= icepop_ratio_high
    Flags: --icepop-ratio-low 0.2, --icepop-ratio-high 5.0.
    Reference: Ling team 2025, "Every step evolves" (IcePop).
    """
    log_r = _cur_over_rollout(inputs)
    low, high = config.icepop_ratio_low, config.icepop_ratio_high
    return _masked_surrogate(inputs, log_r, *_outside_ratio_band(log_r, low, high))


@token_separable
def dppo_tv(inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    """Importance ratio on tokens whose probability moved little; symmetric, whatever the sign of A.

    loss = -keep A r, r = exp(cur - rollout), keep = -dppo_diff_low <= pi_cur - pi_rollout <=
    dppo_diff_high
    Flags: --dppo-diff-low 0.2, --dppo-diff-high 0.2, --dppo-ratio-cap (none).
    Reference: Qi et al. 2026 (DPPO, total variation), in the symmetric form of prime-rl.
    """
    log_r = _cur_over_rollout(inputs)
    difference = _probability_shift(inputs)
    too_low = difference < -config.dppo_diff_low - EDGE_TOLERANCE
    too_high = difference > config.dppo_diff_high + EDGE_TOLERANCE
    return _masked_surrogate(inputs, log_r, too_low, too_high, cap=config.dppo_ratio_cap)


@token_separable
def dppo(inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    """Drops A > 0 that rose too far and A <= 0 that fell too far; penalizes every token's drift.

    loss = -keep A r + kl_tau log(r)^2, r = exp(cur - rollout), keep = pi_cur - pi_rollout <=
    dppo_mask_high for A > 0, >= -dppo_mask_low else
    Flags: --dppo-mask-low 0.2, --dppo-mask-high 0.2, --kl-tau 0.001.
    Reference: Qi et al. 2026 (DPPO); squared log-ratio penalty as in prime-rl.
    """
    log_r = _cur_over_rollout(inputs)
    difference = _probability_shift(inputs)
    positive = inputs.advantages > 0
    too_high = positive & (difference > config.dppo_mask_high + EDGE_TOLERANCE)
    too_low = ~positive & (difference < -config.dppo_mask_low - EDGE_TOLERANCE)
    term = _masked_surrogate(inputs, log_r, too_low, too_high)
    return replace(term, penalty=config.kl_tau * log_r.square())


@token_separable
def ipo_kl(inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    """IcePop's band with a drift penalty that acts on kept tokens only.

    loss = keep (-A r + kl_tau log(r)^2), r = exp(cur - rollout), keep = ipo_ratio_low <= r <=
    ipo_ratio_high
    Flags: --ipo-ratio-low 0.2, --ipo-ratio-high 5.0, --kl-tau 0.001.
    Reference: Prime Intellect 2025, prime-rl (masked ratio with a squared log-ratio penalty).
    """
    log_r = _cur_over_rollout(inputs)
    outside = _outside_ratio_band(log_r, config.ipo_ratio_low, config.ipo_ratio_high)
    term = _masked_surrogate(inputs, log_r, *outside)
    pull = torch.where(term.kept, config.kl_tau * log_r.square(), 0.0)
    return replace(term, loss=term.loss + pull)  # a mask that drops a token drops its pull


@token_separable
def ipo_tv(inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    """One bound on how far a probability may move either way, and a drift penalty on every token.

    loss = -keep A r + kl_tau log(r)^2, r = exp(cur - rollout), keep = |pi_cur - pi_rollout| <=
    ipo_threshold
    Flags: --ipo-threshold 0.1, --kl-tau 0.001.
    Reference: Prime Intellect 2026, prime-rl's loss of type `ipo`; its older one is `ipo_kl`.
    """
    log_r, difference = _cur_over_rollout(inputs), _probability_shift(inputs)
    bound = config.ipo_threshold + EDGE_TOLERANCE
    term = _masked_surrogate(inputs, log_r, difference < -bound, difference > bound)
    return replace(term, penalty=config.kl_tau * log_r.square())


@token_separable
def dppo_kl(inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    """Drops a token whose binary KL left the bound in the direction in which A pushes it.

    loss = -keep A r, r = exp(cur - rollout); dropped if D > dppo_kl_threshold and pi_cur >
    pi_rollout for A > 0, D > dppo_kl_threshold_low and pi_cur < pi_rollout else; D = KL of (pi, 1 -
    pi), rollout from cur
    Flags: --dppo-kl-threshold 0.05, --dppo-kl-threshold-low (= dppo-kl-threshold),
        --dppo-ratio-cap (none).
    Reference: Qi et al. 2026 (DPPO, binary KL), arXiv 2602.04879; the direction as in the authors'
        code, probabilities within 1e-6 of 0 and 1.
    """
    log_r = _cur_over_rollout(inputs)
    rollout, cur = inputs.require_rollout(), inputs.cur_log_probs
    distance, low = binary_kl(rollout, cur, inputs.mask), config.dppo_kl_threshold_low
    low = config.dppo_kl_threshold if low is None else low
    moved, positive = log_r.detach(), inputs.advantages > 0
    too_high = positive & (moved > 0) & (distance > config.dppo_kl_threshold + EDGE_TOLERANCE)
    too_low = ~positive & (moved < 0) & (distance > low + EDGE_TOLERANCE)
    return _masked_surrogate(inputs, log_r, too_low, too_high, cap=config.dppo_ratio_cap)


def vespo(inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    """A soft weight per sequence, shaped like a gamma density: 1 at w = 1, 0 far from it.

    loss = -sg(phi(w)) A cur, w = exp(sum(cur - rollout)), phi(w) = exp(lambda) w^k exp(-lambda w);
    k and lambda by the sign of A (0 counts as positive); log w within [log 1e-8, 20]
    Flags: --vespo-k-pos 2.0, --vespo-lambda-pos 3.0, --vespo-k-neg 3.0, --vespo-lambda-neg 2.0.
    Reference: VESPO 2026, arXiv 2602.10693 (abstract and the authors' and TRL's descriptions).
    """
    log_w = _sequence_over_rollout(inputs).clamp(math.log(_SMALLEST_SEQUENCE_RATIO), MAX_LOG_RATIO)
    positive = inputs.advantages >= 0
    k = torch.where(positive, config.vespo_k_pos, config.vespo_k_neg)
    rate = torch.where(positive, config.vespo_lambda_pos, config.vespo_lambda_neg)
    phi = safe_exp(rate + k * log_w - rate * log_w.exp())
    return _weighted(inputs, log_w, phi, {"vespo/phi": phi})


def topr(inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    """Pulls up what was good at full weight; pushes down what was bad only as far as it is likely.

    loss = -sg(w) A cur, w = 1 for A >= 0, else min(1, exp(sum(cur - rollout)))
    Flags: none.
    Reference: Le Roux et al. 2025 (TOPR), arXiv 2503.14286.
    """
    log_w = _sequence_over_rollout(inputs)
    tapered = inputs.advantages < 0
    weight = torch.where(tapered, safe_exp(log_w.clamp(max=0.0)), 1.0)
    clipped = (tapered & (log_w > 0)).float()
    return _weighted(inputs, log_w, weight, {"pg_clipfrac": clipped})


@token_separable
def dro(inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    """Policy gradient with a quadratic pull back to the policy that sampled; no ratio at all.

    loss = -(A cur - dro_beta / 2 (cur - rollout)^2)
    Flags: --dro-beta 1.0.
    Reference: Richemond et al. 2024 (DRO), arXiv 2405.19107, with the advantage in place of reward
        less value; the per-token form of Tinker (a secondary source).
    """
    log_r = _cur_over_rollout(inputs)
    pull = config.dro_beta / 2 * log_r.square()
    loss = -inputs.advantages * inputs.cur_log_probs
    ratio, metrics = safe_exp(log_r.detach()), {"dro/pull": pull.detach()}
    return PolicyTerm(loss, inputs.mask, metrics, ratio=ratio, penalty=pull)


def minpro(inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    """The prefix's ratio, of which the smallest token ratio before a token stands for the product.

    loss = -sg(min(w, 1 + eps_clip_high)) A cur, w_t = r_t min over i < t of r_i, r = exp(cur -
    rollout); w = r at the first token
    Flags: --eps-clip-high (= eps-clip, 0.2).
    Reference: Lei et al. 2026 (MinPRO), arXiv 2601.22718; the abstract and a secondary summary: the
        upper bound is CISPO's, not the paper's.
    """
    log_r = _cur_over_rollout(inputs).detach()
    before = inputs.shards.prefix_min(log_r, inputs.mask)
    log_w = log_r + torch.where(before.isinf(), 0.0, before)
    high = 1.0 + config.clip_high
    weight = safe_exp(log_w).clamp(max=high)
    clipped = (~inside_band(log_w, 0.0, high)).float()
    return _weighted(inputs, log_w, weight, {"pg_clipfrac": clipped})


def _cur_over_rollout(inputs: LossInputs) -> Tensor:
    return log_ratio(inputs.cur_log_probs, inputs.require_rollout(), inputs.mask)


def _probability_shift(inputs: LossInputs) -> Tensor:
    return probability_difference(inputs.cur_log_probs, inputs.require_rollout(), inputs.mask)


def _sequence_over_rollout(inputs: LossInputs) -> Tensor:
    """[T]: sum(cur - rollout) over the sequence of every token, without gradient."""
    shards = inputs.shards
    return shards.per_token(sequence_log_ratio(_cur_over_rollout(inputs), shards))


def _weighted(
    inputs: LossInputs,
    log_w: Tensor,
    weight: Tensor,
    metrics: dict[str, Tensor],
) -> PolicyTerm:
    """-weight A cur; `weight` carries no gradient, `log_w` is what it was made of."""
    loss = -weight * inputs.advantages * inputs.cur_log_probs
    weight = torch.where(inputs.mask, weight, 0.0)
    return PolicyTerm(loss, inputs.mask, metrics, ratio=safe_exp(log_w), weight=weight)


def _outside_ratio_band(log_r: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    outside = ~inside_band(log_r, low, high)
    below = log_r.detach() < log_bound(low)
    return outside & below, outside & ~below


def _masked_surrogate(
    inputs: LossInputs,
    log_r: Tensor,
    too_low: Tensor,
    too_high: Tensor,
    cap: float | None = None,
) -> PolicyTerm:
    """-A r on the tokens inside the band."""
    kept = inputs.mask & ~(too_low | too_high)
    # Selecting the log-ratio before exp keeps a dropped token's huge ratio out of value and
    # gradient.
    ratio = safe_exp(torch.where(kept, log_r, 0.0))
    if cap is not None:
        ratio = ratio.clamp(max=cap)
    loss = torch.where(kept, -inputs.advantages * ratio, 0.0)
    metrics = {
        "is_masked": (inputs.mask & ~kept).float(),
        "is_masked_low": (inputs.mask & too_low).float(),
        "is_masked_high": (inputs.mask & too_high).float(),
    }
    weight = torch.where(kept, ratio.detach(), 0.0)
    return PolicyTerm(loss, kept, metrics, ratio=safe_exp(log_r.detach()), weight=weight)
