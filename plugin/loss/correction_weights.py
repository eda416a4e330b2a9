"""What a correction does to every token: its ratio before bounding, its weight after, and what it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plugin.config import LossConfig
from plugin.loss.hook_calling import apply_hooks
from plugin.loss.interfaces import LossInputs, PolicyTerm
from plugin.ppo_utils.importance_ratio import log_ratio, safe_exp


@dataclass(frozen=True)
class CorrectionWeights:
    """ratio: [T] before bounding; weight: [T] after, 0 where dropped; kept: [T] bool."""

    ratio: Tensor
    weight: Tensor
    kept: Tensor


def correction_weights(
    args: Any, config: LossConfig, inputs: LossInputs, policy: PolicyTerm
) -> CorrectionWeights | None:
    """The weights of the correction in use, or None where nothing is corrected; no gradient.

    A hook is linear in the loss it weights, so its weights are what it makes of a loss of ones. Losses that
    compare cur with rollout themselves carry exp(cur - rollout) on the tokens that `policy` keeps.
    """
    with torch.no_grad():
        if config.loss_traits.compares_with == "rollout":
            ratio = safe_exp(log_ratio(inputs.cur_log_probs, inputs.require_rollout(), inputs.mask))
            cap = config.dppo_ratio_cap if config.policy_loss == "dppo_tv" else None
            weight = ratio if cap is None else ratio.clamp(max=cap)
            return CorrectionWeights(ratio, torch.where(policy.kept, weight, 0.0), policy.kept)
        if not config.use_tis:
            return None
        ones = PolicyTerm(torch.where(inputs.mask, 1.0, 0.0), inputs.mask)
        corrected = apply_hooks(args, config.hook_names(), ones, inputs)
        # A pure rejection keeps a token as it is: its weight is 1 before and 1 or 0 after.
        before = corrected.metrics.get("tis", torch.ones_like(corrected.loss))
        return CorrectionWeights(before, corrected.loss, corrected.kept)
