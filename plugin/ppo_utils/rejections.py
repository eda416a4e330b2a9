"""Correction hooks that reject tokens or whole sequences: they change the loss masks.

A rejected token is 0 in the returned masks and its loss is exactly 0. Whether it stays in the denominator is
the caller's decision (`--loss-denominator`). The calling contract is that of `corrections.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plugin.config.rejection_rules import RejectionRule, parse_rejection_rules
from plugin.errors import ConfigError
from plugin.ppo_utils.corrections import HookResult
from plugin.ppo_utils.hook_inputs import HookTokens, hook_tokens, setting
from plugin.ppo_utils.importance_ratio import (
    EDGE_TOLERANCE,
    geometric_log_ratio,
    inside_band,
    log_bound,
    log_ratio,
    probability_difference,
    safe_exp,
)
from plugin.ppo_utils.kl_estimators import KL_ESTIMATORS
from plugin.ppo_utils.separability import token_separable


def geometric_mask_function(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **kwargs: Any,
) -> HookResult:
    """Reject sequences whose mean mismatch leaves a narrow band; length does not bias the decision.

    keep = geometric_mask_low <= exp(mean(train - rollout)) <= geometric_mask_high
    Flags: --geometric-mask-low 0.99, --geometric-mask-high 1.01.
    Reference: Liu et al. 2025, "When speed kills stability" (geometric sequence masking).
    """
    tokens = hook_tokens(pg_loss, loss_masks, train_log_probs, rollout_log_probs, **kwargs)
    low, high = setting(args, "geometric_mask_low"), setting(args, "geometric_mask_high")
    with torch.no_grad():
        mean_log_r = geometric_log_ratio(tokens.train_over_rollout(), tokens.mask, tokens.shards)
        log_r = tokens.shards.per_token(mean_log_r)
        metrics = {"geometric_ratio": tokens.metric(safe_exp(log_r))}
        low_side, high_side = log_r < log_bound(low), log_r > log_bound(high)
        keep = inside_band(log_r, low, high)
    return _rejected(tokens, pg_loss, loss_masks, keep, metrics, low_side, high_side)


def rejection_function(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **kwargs: Any,
) -> HookResult:
    """Keep only what every rule keeps: a statistic of the mismatch inside its band.

    keep = low <= statistic <= high for every rule level_statistic=low:high; statistic: ratio exp(train - rollout),
    or k1, k2, k3 of rollout - train; level: token, or mean, sum, max over the sequence
    Flags: --rejection-rules token_ratio=0.5:2.0. Level token drops tokens, the others whole sequences. Of ratios,
    mean is the geometric mean and sum the product. Several rules: "token_ratio=0.2:5,mean_k3=:0.01,max_k2=:8".
    Reference: Liu et al. 2025 (masked importance sampling); rollout correction in verl.
    """
    tokens = hook_tokens(pg_loss, loss_masks, train_log_probs, rollout_log_probs, **kwargs)
    rules = parse_rejection_rules(setting(args, "rejection_rules"))
    metrics: dict[str, Tensor] = {}
    with torch.no_grad():
        log_r = tokens.train_over_rollout()
        keep = tokens.mask.clone()
        for rule in rules:
            kept_by_rule = _rule_keeps(rule, log_r, tokens)
            metrics[f"rejected_by_{rule.name}"] = tokens.metric(~kept_by_rule)
            keep &= kept_by_rule
    return _rejected(tokens, pg_loss, loss_masks, keep, metrics)


def veto_function(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **kwargs: Any,
) -> HookResult:
    """Reject a sequence if the trainer finds any one of its tokens all but impossible.

    keep = min over the sequence of exp(train - rollout) >= veto_threshold
    Flags: --veto-threshold 1e-4.
    Reference: rollout correction in verl (token veto).
    """
    tokens = hook_tokens(pg_loss, loss_masks, train_log_probs, rollout_log_probs, **kwargs)
    with torch.no_grad():
        smallest = -tokens.shards.sequence_max(-tokens.train_over_rollout(), tokens.mask)
        keep = smallest >= math.log(setting(args, "veto_threshold")) - EDGE_TOLERANCE
    return _rejected(tokens, pg_loss, loss_masks, tokens.shards.per_token(keep), {})


def opsm_function(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor] | None = None,
    cur_log_probs: Sequence[Tensor] | None = None,
    advantages: Sequence[Tensor] | None = None,
    **kwargs: Any,
) -> HookResult:
    """Off-policy sequence masking: stop pushing down sequences the policy has already left.

    drop = A < 0 and mean over the sequence of (train - cur) > opsm_delta
    Flags: --opsm-delta 1e-4.
    Reference: DeepSeek-AI 2025, DeepSeek-V3.2 (off-policy sequence masking).
    """
    tokens = hook_tokens(
        pg_loss,
        loss_masks,
        train_log_probs,
        rollout_log_probs,
        cur_log_probs=cur_log_probs,
        advantages=advantages,
        **kwargs,
    )
    if tokens.cur is None or tokens.train is None or tokens.advantages is None:
        raise ConfigError(
            "opsm_function needs cur_log_probs, train_log_probs and advantages; call it through "
            "plugin.loss.policy_loss_function, which passes them"
        )
    with torch.no_grad():
        drift = log_ratio(tokens.train, tokens.cur, tokens.mask)
        mean_drift = geometric_log_ratio(drift, tokens.mask, tokens.shards)
        drifted = tokens.shards.per_token(mean_drift) > setting(args, "opsm_delta")
        keep = ~(drifted & (tokens.metric(tokens.advantages) < 0))
        metrics = {"opsm_clipfrac": tokens.metric(~keep)}
    return _rejected(tokens, pg_loss, loss_masks, keep, metrics)


@token_separable
def dppo_tv_mask_function(
    args: Any,
    *,
    pg_loss: Tensor,
    loss_masks: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    train_log_probs: Sequence[Tensor] | None = None,
    cur_log_probs: Sequence[Tensor] | None = None,
    **kwargs: Any,
) -> HookResult:
    """Reject tokens whose probability (not ratio) moved too far from the rollout policy.

    keep = -dppo_diff_low <= pi_cur - pi_rollout <= dppo_diff_high
    Flags: --dppo-diff-low 0.2, --dppo-diff-high 0.2.
    Reference: Qi et al. 2026, DPPO (binary total-variation mask), in its symmetric form.
    """
    tokens = hook_tokens(
        pg_loss,
        loss_masks,
        train_log_probs,
        rollout_log_probs,
        cur_log_probs=cur_log_probs,
        **kwargs,
    )
    tokens.require_cur("dppo_tv_mask_function")
    assert tokens.cur is not None and tokens.rollout is not None
    with torch.no_grad():
        difference = probability_difference(tokens.cur, tokens.rollout, tokens.mask)
        too_low = difference < -setting(args, "dppo_diff_low") - EDGE_TOLERANCE
        too_high = difference > setting(args, "dppo_diff_high") + EDGE_TOLERANCE
        metrics = {"prob_diff_abs": tokens.metric(difference.abs())}
    return _rejected(tokens, pg_loss, loss_masks, ~(too_low | too_high), metrics, too_low, too_high)


def _rule_keeps(rule: RejectionRule, log_r: Tensor, tokens: HookTokens) -> Tensor:
    """bool [T]: what one rule keeps. Ratios are compared in log space, where they cannot overflow."""
    if rule.statistic == "ratio":
        values, low, high = log_r, log_bound(rule.low), log_bound(rule.high)
    else:
        values, low, high = KL_ESTIMATORS[rule.statistic](-log_r), rule.low, rule.high
    if rule.level == "max":
        values = tokens.shards.per_token(tokens.shards.sequence_max(values, tokens.mask))
    elif rule.level in ("sum", "mean"):
        total, count = tokens.shards.sequence_sums(tokens.metric(values), tokens.mask)
        values = tokens.shards.per_token(
            total / count.clamp(min=1) if rule.level == "mean" else total
        )
    return (values >= low - EDGE_TOLERANCE) & (values <= high + EDGE_TOLERANCE)


def _rejected(
    tokens: HookTokens,
    pg_loss: Tensor,
    loss_masks: Sequence[Tensor],
    keep: Tensor,
    metrics: dict[str, Tensor],
    low_side: Tensor | None = None,
    high_side: Tensor | None = None,
) -> HookResult:
    """The result of a hook that rejects: zero loss, zeroed masks, and how much was rejected."""
    metrics["is_masked"] = tokens.metric(~keep)
    if low_side is not None and high_side is not None:
        metrics["is_masked_low"] = tokens.metric(~keep & low_side)
        metrics["is_masked_high"] = tokens.metric(~keep & high_side)
    return tokens.kept(pg_loss, keep), tokens.shards.masks_and(loss_masks, keep), metrics
