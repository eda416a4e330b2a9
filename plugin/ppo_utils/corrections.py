"""Correction hooks that weight the policy loss: one function per correction.

Every hook keeps one contract, the one slime calls its TIS functions with:

    fn(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, cur_log_probs=None, advantages=None,
       total_lengths=None, response_lengths=None, **kwargs) -> (pg_loss, loss_masks, metrics)

`pg_loss` is flat [T] over local response tokens; log-probs and advantages are lists of 1-D tensors, one per
sample; `loss_masks` are full-response masks; `metrics` maps a name to a flat [T] tensor, 0 where masked, that
the caller reduces over the original masks. Weights carry no gradient. Hooks are pure.

The hooks that reject tokens or sequences are in `rejections.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plugin.ppo_utils.hook_inputs import HookTokens, hook_tokens, setting
from plugin.ppo_utils.importance_ratio import (
    clipped_ratio,
    geometric_log_ratio,
    inside_band,
    log_bound,
    safe_exp,
    sequence_log_ratio,
)
from plugin.ppo_utils.separability import token_separable

HookResult = tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]


@token_separable
def vanilla_tis_function(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **kwargs: Any,
) -> HookResult:
    """Truncated importance sampling on the train/rollout mismatch.

    weight = clip(exp(train - rollout), tis_clip_low, tis_clip)
    Flags: --tis-clip 2.0, --tis-clip-low 0.
    Reference: Espeholt et al. 2018 (IMPALA); Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training".
    """
    tokens = hook_tokens(pg_loss, loss_masks, train_log_probs, rollout_log_probs, **kwargs)
    low, high = setting(args, "tis_clip_low"), setting(args, "tis_clip")
    with torch.no_grad():
        log_r = tokens.train_over_rollout()
        weight = clipped_ratio(log_r, low, high)
        clipped = ~inside_band(log_r, low, high)
        metrics = _weight_metrics(tokens, log_r, clipped)
    return tokens.weighted(pg_loss, weight), loss_masks, metrics


@token_separable
def icepop_function(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **kwargs: Any,
) -> HookResult:
    """Double-sided ratio mask: tokens whose mismatch leaves the band are dropped, not clipped.

    weight = exp(train - rollout) inside [tis_clip_low, tis_clip], else 0
    Flags: --tis-clip 2.0, --tis-clip-low 0. Dropped tokens are reported as `is_masked`; the loss masks stay,
    so the dropped tokens stay in the denominator.
    Reference: Ling team 2025, "Every step evolves" (IcePop).
    """
    tokens = hook_tokens(pg_loss, loss_masks, train_log_probs, rollout_log_probs, **kwargs)
    low, high = setting(args, "tis_clip_low"), setting(args, "tis_clip")
    with torch.no_grad():
        log_r = tokens.train_over_rollout()
        keep = inside_band(log_r, low, high)
        weight = torch.where(keep, safe_exp(log_r), 0.0)
        metrics = _weight_metrics(tokens, log_r, ~keep)
        metrics["is_masked"] = metrics["tis_clipfrac"]
        metrics["is_masked_low"] = tokens.metric(~keep & (log_r < log_bound(low)))
        metrics["is_masked_high"] = tokens.metric(~keep & (log_r > log_bound(high)))
    return tokens.weighted(pg_loss, weight), loss_masks, metrics


@token_separable
def off_policy_is_function(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor] | None = None,
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    cur_log_probs: Sequence[Tensor] | None = None,
    **kwargs: Any,
) -> HookResult:
    """Importance sampling of the current policy against the rollout policy: mismatch and staleness at once.

    weight = sg(clip(exp(cur - rollout), 1 - eps_clip, 1 + eps_clip_high))
    Flags: --eps-clip 0.2 (1.0 removes the lower bound), --eps-clip-high (= eps-clip).
    Unbiased up to the clip on `--policy-loss reinforce`, where it is the CISPO surrogate. On a base that
    already carries pi_theta / pi_old it counts that ratio twice and needs --allow-biased-correction.
    Reference: Degris et al. 2012, off-policy actor-critic; MiniMax 2025 (CISPO).
    """
    tokens = hook_tokens(
        pg_loss,
        loss_masks,
        train_log_probs,
        rollout_log_probs,
        cur_log_probs=cur_log_probs,
        **kwargs,
    )
    tokens.require_cur("off_policy_is_function")
    _warn_if_base_carries_ratio(args)
    low = max(0.0, 1.0 - setting(args, "eps_clip"))
    high = 1.0 + (setting(args, "eps_clip_high") or setting(args, "eps_clip"))
    with torch.no_grad():
        log_r = tokens.cur_over_rollout()
        weight = clipped_ratio(log_r, low, high)
        metrics = _weight_metrics(tokens, log_r, ~inside_band(log_r, low, high))
    return tokens.weighted(pg_loss, weight), loss_masks, metrics


def sequence_tis_function(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **kwargs: Any,
) -> HookResult:
    """Truncated importance sampling with one weight per sequence.

    weight = clip(exp(sum(train - rollout)), sequence_tis_clip_low, sequence_tis_clip), or exp(mean) at the
    geometric level; the exponent is bounded to +-20.
    Flags: --sequence-tis-clip 2.0, --sequence-tis-clip-low 0, --sequence-tis-level sequence|geometric.
    Reference: Precup et al. 2000 (per-decision and trajectory importance sampling); Zheng et al. 2025 (GSPO)
    for the geometric level.
    """
    tokens = hook_tokens(pg_loss, loss_masks, train_log_probs, rollout_log_probs, **kwargs)
    low, high = setting(args, "sequence_tis_clip_low"), setting(args, "sequence_tis_clip")
    with torch.no_grad():
        token_log_r = tokens.train_over_rollout()
        if setting(args, "sequence_tis_level") == "geometric":
            sequence_log_r = geometric_log_ratio(token_log_r, tokens.mask, tokens.shards)
        else:
            sequence_log_r = sequence_log_ratio(token_log_r, tokens.shards)
        log_r = tokens.shards.per_token(sequence_log_r)
        weight = clipped_ratio(log_r, low, high)
        metrics = _weight_metrics(tokens, log_r, ~inside_band(log_r, low, high))
    return tokens.weighted(pg_loss, weight), loss_masks, metrics


def _weight_metrics(tokens: HookTokens, log_r: Tensor, clipped: Tensor) -> dict[str, Tensor]:
    ratio = safe_exp(log_r)
    return {
        "tis": tokens.metric(ratio),
        "tis_abs": tokens.metric((ratio - 1).abs()),
        "tis_clipfrac": tokens.metric(clipped),
    }


_warned_about_ratio = False


def _warn_if_base_carries_ratio(args: Any) -> None:
    """One warning per process when another framework's loss already carries pi_theta / pi_old."""
    global _warned_about_ratio
    base = getattr(args, "policy_loss", None) or getattr(args, "pg_loss_type", None)
    if (
        _warned_about_ratio
        or base == "reinforce"
        or getattr(args, "allow_biased_correction", False)
    ):
        return
    _warned_about_ratio = True
    warnings.warn(
        f"off_policy_is_function on a {base or 'PPO-style'} loss counts pi_theta/pi_old twice; it is right "
        "there only for the first update on each rollout. Use a REINFORCE base (-A * cur_log_probs).",
        stacklevel=3,
    )
