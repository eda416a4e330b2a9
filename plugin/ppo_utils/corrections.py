"""The built-in corrections: one function of tokens each, exported as hooks with slime's signature.

    fn(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, proximal_log_probs=None,
       cur_log_probs=None, advantages=None, total_lengths=None, response_lengths=None, **kwargs)
       -> (pg_loss, loss_masks, metrics)

`pg_loss` is flat [T] over local response tokens; log-probs and advantages are lists of 1-D tensors,
one per sample; `loss_masks` are full-response masks; `metrics` maps a name to a flat [T] tensor, 0
where masked, that the caller reduces over the original masks. Weights carry no gradient. Whether a
dropped token stays in the denominator is the caller's decision (`--loss-denominator`).

Corrections that only drop (`plugin.config.loss.corrections.MASKS`) count no ratio and fit every
loss, also those that compare with the rollout policy themselves.

In the formulas, proximal is the policy that the loss's clipped ratio is taken against: the
trainer's own, `train_log_probs`, unless --train-log-probs chose another. A caller that passes no
`proximal_log_probs`, such as slime, means the trainer's own.

Each docstring is the correction's entry in `megatron-tis corrections`: a sentence, the formula, the
flags with their defaults, the reference.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import torch
from torch import Tensor

from plugin.config.loss.corrections import RejectionRule, ess_target, parse_rejection_rules
from plugin.ppo_utils.batch_statistics import (
    batch_statistics,
    effective_share,
    mean_weight,
    moment_round,
    second_moment_rounds,
    tis_bound,
    tis_rounds,
    within_second_moment,
)
from plugin.ppo_utils.correction_interface import (
    Corrected,
    CorrectionTokens,
    correction,
    token_separable,
)
from plugin.ppo_utils.importance_ratio import (
    EDGE_TOLERANCE,
    KL_ESTIMATORS,
    binary_kl,
    clipped_ratio,
    geometric_log_ratio,
    inside_band,
    log_bound,
    probability_difference,
    safe_exp,
    sequence_log_ratio,
)
from plugin.ppo_utils.masked_ops import zero_masked

__all__ = [
    "dppo_tv_mask_function",
    "ess_tis_function",
    "geometric_mask_function",
    "icepop_function",
    "kpop_function",
    "m2po_function",
    "off_policy_is_function",
    "opsm_function",
    "rejection_function",
    "segment_tis_function",
    "sequence_tis_function",
    "vanilla_tis_function",
    "veto_function",
]


@token_separable
@batch_statistics(tis_rounds)
@correction
def vanilla_tis_function(tokens: CorrectionTokens, config: Any) -> Corrected:
    """Truncated importance sampling on the train/rollout mismatch.

    weight = clip(exp(proximal - rollout), tis_clip_low, tis_clip), with --tis-batch-normalize
    divided by its mean over the batch
    Flags: --tis-clip 2.0, --tis-batch-normalize False, --tis-clip-low 0. --tis-clip auto:ess=0.9
        takes, per step, the largest bound of at least 1 that keeps ESS / N of the whole batch's
        weights at 0.9.
    Reference: Espeholt et al. 2018 (IMPALA); Yao et al. 2025, "Your efficient RL framework secretly
        brings you off-policy RL training".
    """
    log_r, high = tokens.log_ratio("proximal", "rollout"), tis_bound(tokens.statistics, config)
    weight, keep, metrics = _truncated(log_r, config.tis_clip_low, high)
    if ess_target(config.tis_clip) is not None:
        metrics["tis_clip_found"] = torch.full_like(log_r, high)
    if config.tis_batch_normalize:
        mean = mean_weight(tokens.statistics)
        weight, metrics["tis_mean_weight"] = weight / mean, torch.full_like(log_r, mean)
    return weight, keep, metrics


@token_separable
@correction
def icepop_function(tokens: CorrectionTokens, config: Any) -> Corrected:
    """Double-sided ratio mask: tokens whose mismatch leaves the band are dropped, not clipped.

    weight = exp(proximal - rollout) inside [tis_clip_low, tis_clip], else 0
    Flags: --tis-clip 2.0, --tis-clip-low 0.
    Reference: Ling team 2025, "Every step evolves" (IcePop).
    """
    low, high = config.tis_clip_low, config.tis_clip
    log_r = tokens.log_ratio("proximal", "rollout")
    _, _, metrics = _truncated(log_r, low, high)
    keep = inside_band(log_r, low, high)
    return safe_exp(log_r), keep, metrics | _outside(keep, log_r, low, high)


@token_separable
@correction
def off_policy_is_function(tokens: CorrectionTokens, config: Any) -> Corrected:
    """Importance sampling of cur against rollout: mismatch and staleness at once.

    weight = sg(clip(exp(cur - rollout), 1 - eps_clip, 1 + eps_clip_high))
    Flags: --eps-clip 0.2 (1.0 removes the lower bound), --eps-clip-high (= eps-clip).
    Unbiased up to the clip on `--policy-loss reinforce`, where it is the CISPO surrogate. On a base
    that already carries pi_theta / pi_old it counts that ratio twice and needs
    --allow-biased-correction. Stale samples need a wide clip, such as --eps-clip 1 --eps-clip-high
    4: with the default the weight of a token that the policy has left never falls below 0.8.
    Reference: Degris et al. 2012, off-policy actor-critic; MiniMax 2025 (CISPO).
    """
    log_r = tokens.log_ratio("cur", "rollout")
    base = getattr(config, "pg_loss_type", None) or config.policy_loss
    if base != "reinforce" and not config.allow_biased_correction:
        _warn_of_doubled_ratio()
    high = 1.0 + (config.eps_clip_high or config.eps_clip)
    return _truncated(log_r, max(0.0, 1.0 - config.eps_clip), high)


@correction
def sequence_tis_function(tokens: CorrectionTokens, config: Any) -> Corrected:
    """Truncated importance sampling with one weight per sequence.

    weight = clip(exp(sum(proximal - rollout)), sequence_tis_clip_low, sequence_tis_clip), or
    exp(mean) at the geometric level; the exponent is bounded to +-20.
    Flags: --sequence-tis-clip 2.0, --sequence-tis-clip-low 0, --sequence-tis-level
        sequence|geometric.
    Reference: Precup et al. 2000 (per-decision and trajectory importance sampling); Zheng et al.
        2025 (GSPO) for the geometric level.
    """
    log_r = tokens.log_ratio("proximal", "rollout")
    if config.sequence_tis_level == "geometric":
        per_sequence = geometric_log_ratio(log_r, tokens.mask, tokens.shards)
    else:
        per_sequence = sequence_log_ratio(log_r, tokens.shards)
    return _truncated(
        tokens.shards.per_token(per_sequence),
        config.sequence_tis_clip_low,
        config.sequence_tis_clip,
    )


@correction
def segment_tis_function(tokens: CorrectionTokens, config: Any) -> Corrected:
    """Truncated importance sampling with one weight per segment: between token and sequence.

    weight = clip(exp(sum over the segment of (proximal - rollout)), sequence_tis_clip_low,
    sequence_tis_clip), or exp(mean) at the geometric level; segments of segment_tis_length response
    tokens or, with `turn`, one per turn of a conversation; the exponent bounded to +-20
    Flags: --segment-tis-length 64|turn, --sequence-tis-clip 2.0, --sequence-tis-clip-low 0,
        --sequence-tis-level sequence|geometric.
    Reference: Precup et al. 2000 (products of ratios over a part of a trajectory); segments of
        equal length are our choice, papers cut at reasoning steps.
    """
    log_r = tokens.log_ratio("proximal", "rollout")
    total, count = tokens.segment_sums(config.segment_tis_length, log_r, tokens.mask)
    if config.sequence_tis_level == "geometric":
        total = total / count.clamp(min=1)
    return _truncated(total, config.sequence_tis_clip_low, config.sequence_tis_clip)


@token_separable
@batch_statistics(second_moment_rounds)
@correction
def m2po_function(tokens: CorrectionTokens, config: Any) -> Corrected:
    """Drops the tokens with the largest log-ratios until the batch's second moment is small.

    weight = r on kept tokens, r = exp(proximal - rollout); kept are the smallest log(r)^2 of the
    whole batch whose mean is at most m2po_threshold, equal ones together
    Flags: --m2po-threshold 0.04. The batch is the step's, over all microbatches and ranks; in
        another framework it is the microbatch.
    Reference: Zheng et al. 2025 (M2PO), arXiv 2510.01161, by AReaL's description: the mean is over
        what is kept.
    """
    log_r = tokens.log_ratio("proximal", "rollout")
    keep = within_second_moment(log_r, tokens.statistics, config.m2po_threshold)
    ratio = safe_exp(log_r)
    return ratio, keep, {"tis": ratio, "tis_abs": (ratio - 1).abs(), "m2": log_r.square()}


@token_separable
@correction
def kpop_function(tokens: CorrectionTokens, config: Any) -> Corrected:
    """IcePop with a region that adapts to the probability: both binary KLs are small.

    weight = r on kept tokens, r = exp(proximal - rollout); keep = D(proximal || rollout)
    <= kpop_threshold and D(rollout || proximal) <= kpop_threshold, D the KL of (pi, 1 - pi)
    Flags: --kpop-threshold 0.1.
    Reference: Guo et al. 2026 (KPop), by its introduction and verl's version (binary_kl), whose
        probabilities stay 1e-6 away from 0 and 1.
    """
    proximal, rollout = tokens.get("proximal_log_probs"), tokens.get("rollout_log_probs")
    forward = binary_kl(proximal, rollout, tokens.mask)
    larger = torch.maximum(forward, binary_kl(rollout, proximal, tokens.mask))
    log_r = tokens.log_ratio("proximal", "rollout")
    keep, ratio = larger <= config.kpop_threshold + EDGE_TOLERANCE, safe_exp(log_r)
    metrics = {"tis": ratio, "tis_abs": (ratio - 1).abs(), "binary_kl": larger}
    sides = {"is_masked_low": ~keep & (log_r < 0), "is_masked_high": ~keep & (log_r > 0)}
    return ratio, keep, metrics | sides


@token_separable
@batch_statistics(moment_round)
@correction
def ess_tis_function(tokens: CorrectionTokens, config: Any) -> Corrected:
    """Caps the weight at the batch's effective sample size: the staler the data, the lower.

    weight = min(r, ESS), r = exp(proximal - rollout), ESS = (sum r)^2 / (N sum r^2) over the batch
    Flags: none. The paper's other half, a pull back to the rollout policy with weight 1 - ESS, is
        left to --use-rollout-kl-loss; its ratio is of the current policy.
    Reference: Fakoor et al. 2026 (P3O), arXiv 2605.12380 (abstract and the authors' description).
    """
    log_r, share = tokens.log_ratio("proximal", "rollout"), effective_share(tokens.statistics)
    weight, keep, metrics = _truncated(log_r, 0.0, share)
    return weight, keep, metrics | {"ess_share": torch.full_like(log_r, share)}


@correction
def geometric_mask_function(tokens: CorrectionTokens, config: Any) -> Corrected:
    """Reject sequences whose mean mismatch leaves a narrow band; length does not bias the decision.

    keep = geometric_mask_low <= exp(mean(proximal - rollout)) <= geometric_mask_high; cur in place
    of proximal with --train-log-probs rollout
    Flags: --geometric-mask-low 0.99, --geometric-mask-high 1.01.
    Reference: Liu et al. 2025, "When speed kills stability" (geometric sequence masking).
    """
    low, high = config.geometric_mask_low, config.geometric_mask_high
    mean = geometric_log_ratio(_compared_by_masks(tokens, config), tokens.mask, tokens.shards)
    log_r = tokens.shards.per_token(mean)
    keep = inside_band(log_r, low, high)
    return None, keep, {"geometric_ratio": safe_exp(log_r), **_outside(keep, log_r, low, high)}


@correction
def rejection_function(tokens: CorrectionTokens, config: Any) -> Corrected:
    """Keep only what every rule keeps: a statistic of the mismatch inside its band.

    keep = low <= statistic <= high for every rule level_statistic=low:high; statistic: ratio
    exp(proximal - rollout), k1, k2, k3 of rollout - proximal, error exp|proximal - rollout|, or
    diff pi_proximal - pi_rollout; level: token, or mean, sum, max over the sequence, or segment,
    the mean over a segment of segment_tis_length tokens or over a turn; cur in place of proximal
    with --train-log-probs rollout
    Flags: --rejection-rules token_ratio=0.5:2.0, --segment-tis-length 64|turn. Level token drops
        tokens, segment segments, the others whole sequences. Of ratios, mean and segment are the
        geometric mean and sum the product. Several rules:
        "token_ratio=0.2:5,mean_k3=:0.01,max_k2=:8".
    Reference: Liu et al. 2025 (masked importance sampling); rollout correction in verl.
    """
    log_r = _compared_by_masks(tokens, config)
    keep, metrics = torch.ones_like(tokens.mask), {}
    for rule in parse_rejection_rules(config.rejection_rules):
        kept_by_rule = _rule_keeps(rule, log_r, tokens, config)
        metrics[f"rejected_by_{rule.name}"] = ~kept_by_rule
        keep = keep & kept_by_rule
    return None, keep, metrics


@correction
def veto_function(tokens: CorrectionTokens, config: Any) -> Corrected:
    """Reject a sequence if the trainer finds any one of its tokens all but impossible.

    keep = min over the sequence of exp(proximal - rollout) >= veto_threshold; cur in place of
    proximal with --train-log-probs rollout
    Flags: --veto-threshold 1e-4.
    Reference: rollout correction in verl (token veto).
    """
    smallest = -tokens.shards.sequence_max(-_compared_by_masks(tokens, config), tokens.mask)
    keep = smallest >= math.log(config.veto_threshold) - EDGE_TOLERANCE
    return None, tokens.shards.per_token(keep), {}


@correction
def opsm_function(tokens: CorrectionTokens, config: Any) -> Corrected:
    """Off-policy sequence masking: stop pushing down sequences the policy has already left.

    drop = mean over the sequence of A < 0 and of (proximal - cur) > opsm_delta
    Flags: --opsm-delta 1e-4, --opsm-level sequence|token. At level token only the tokens whose own
        A < 0 are dropped, as slime's --use-opsm does; the same where A is one per sequence. The
        paper's old policy is the engine: add --use-rollout-logprobs.
    Reference: DeepSeek-AI 2025, DeepSeek-V3.2 (off-policy sequence masking).
    """
    shards, log_r = tokens.shards, tokens.log_ratio("proximal", "cur")
    advantages = zero_masked(tokens.get("advantages"), tokens.mask)
    drift, pushed, count = shards.sequence_sums(log_r, advantages, tokens.mask)
    dropped = shards.per_token(drift / count.clamp(min=1) > config.opsm_delta)
    by_token = config.opsm_level == "token" or getattr(config, "use_opsm", False)
    dropped = dropped & (advantages < 0 if by_token else shards.per_token(pushed < 0))
    return None, ~dropped, {"opsm_clipfrac": dropped}


@token_separable
@correction
def dppo_tv_mask_function(tokens: CorrectionTokens, config: Any) -> Corrected:
    """Reject tokens whose probability (not ratio) moved too far from the rollout policy.

    keep = -dppo_diff_low <= pi_cur - pi_rollout <= dppo_diff_high
    Flags: --dppo-diff-low 0.2, --dppo-diff-high 0.2.
    Reference: Qi et al. 2026, DPPO (binary total-variation mask), in its symmetric form.
    """
    cur, rollout = tokens.get("cur_log_probs"), tokens.get("rollout_log_probs")
    difference = probability_difference(cur, rollout, tokens.mask)
    too_low = difference < -config.dppo_diff_low - EDGE_TOLERANCE
    too_high = difference > config.dppo_diff_high + EDGE_TOLERANCE
    metrics = {
        "prob_diff_abs": difference.abs(),
        "is_masked_low": too_low,
        "is_masked_high": too_high,
    }
    return None, ~(too_low | too_high), metrics


def _compared_by_masks(tokens: CorrectionTokens, config: Any) -> Tensor:
    """log(proximal / rollout) [T]; log(cur / rollout) where proximal is the rollout policy."""
    skipped = config.train_log_probs == "rollout" or config.use_rollout_logprobs
    return tokens.log_ratio("cur" if skipped else "proximal", "rollout")


def _truncated(log_r: Tensor, low: float, high: float) -> tuple[Tensor, None, dict[str, Tensor]]:
    """Weight by exp(log_r) clipped to a band; report the ratio before clipping."""
    ratio = safe_exp(log_r)
    metrics = {
        "tis": ratio,
        "tis_abs": (ratio - 1).abs(),
        "tis_clipfrac": ~inside_band(log_r, low, high),
    }
    return clipped_ratio(log_r, low, high), None, metrics


def _outside(keep: Tensor, log_r: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """On which side of its band a dropped token's ratio lies."""
    return {
        "is_masked_low": ~keep & (log_r < log_bound(low)),
        "is_masked_high": ~keep & (log_r > log_bound(high)),
    }


def _rule_keeps(
    rule: RejectionRule, log_r: Tensor, tokens: CorrectionTokens, config: Any
) -> Tensor:
    """bool [T]: what one rule keeps. Ratios are compared in log space: no overflow."""
    low, high, shards = rule.low, rule.high, tokens.shards
    if rule.statistic == "ratio":
        values, low, high = log_r, log_bound(rule.low), log_bound(rule.high)
    elif rule.statistic == "error":
        values = torch.where(tokens.mask, safe_exp(log_r.abs()), 0.0)
    elif rule.statistic == "diff":
        # rollout exp(log_r) - rollout, of whichever policy log_r compares with it
        rollout = zero_masked(tokens.get("rollout_log_probs"), tokens.mask)
        values = probability_difference(rollout + log_r, rollout, tokens.mask)
    else:
        values = KL_ESTIMATORS[rule.statistic](-log_r)
    if rule.level == "max":
        values = shards.per_token(shards.sequence_max(values, tokens.mask))
    elif rule.level == "segment":
        length = config.segment_tis_length
        total, count = tokens.segment_sums(length, values, tokens.mask)
        values = total / count.clamp(min=1)
    elif rule.level in ("sum", "mean"):
        total, count = shards.sequence_sums(values, tokens.mask)
        values = shards.per_token(total / count.clamp(min=1) if rule.level == "mean" else total)
    return (values >= low - EDGE_TOLERANCE) & (values <= high + EDGE_TOLERANCE)


@functools.cache
def _warn_of_doubled_ratio() -> None:
    """Warn, once per process, that another framework's loss already carries pi_theta / pi_old."""
    warnings.warn(
        "off_policy_is_function on a loss that carries a ratio counts pi_theta/pi_old twice; it "
        "is right there only for the first update on each rollout. Use a REINFORCE base (-A * "
        "cur_log_probs).",
        stacklevel=4,
    )
