"""The policy losses: one small function each, from `LossInputs` to a `PolicyTerm`.

Notation: cur, train, rollout are log-probs; r is a ratio; A the advantage; sg the stop-gradient.
    Inputs are 0
where masked, so every per-token loss is 0 there too.

Each docstring is the entry of its loss in `megatron-tis corrections`: a sentence, the formula, the
flags with their defaults, the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from plugin.config import LossConfig
from plugin.config.import_paths import load_called_with
from plugin.errors import HookLoadError
from plugin.loss.example_tokens import example_inputs
from plugin.loss.interfaces import LossInputs, PolicyTerm
from plugin.ppo_utils.importance_ratio import (
    EDGE_TOLERANCE,
    clipped_ratio,
    geometric_log_ratio,
    inside_band,
    log_bound,
    log_ratio,
    probability_difference,
    safe_exp,
)
from plugin.ppo_utils.separability import token_separable


@token_separable
def ppo(inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    """Clipped surrogate: no gain from moving a token's ratio beyond the clip.

    loss = max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A), r = exp(cur - train); for A < 0
    at most -eps_clip_c A
    Flags: --eps-clip 0.2, --eps-clip-high (= eps-clip), --eps-clip-c (none).
    Reference: Schulman et al. 2017 (PPO); Ye et al. 2020 (dual clip).
    """
    return _clipped_surrogate(_cur_over_train(inputs), inputs, config)


def gspo(inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    """PPO's clip on the ratio of the whole sequence; each token passes its own gradient.

    loss = max(-s A, -clip(s, 1 - eps_clip, 1 + eps_clip_high) A), s = exp(mean(cur - train))
    Flags: --eps-clip 0.2, --eps-clip-high (= eps-clip), --eps-clip-c (none). The paper's bounds are
        3e-4 and 4e-4.
    Reference: Zheng et al. 2025 (GSPO).
    """
    token_log_r = _cur_over_train(inputs)
    sequence_log_r = geometric_log_ratio(token_log_r, inputs.mask, inputs.shards)
    # The value is the sequence's, the gradient the token's: no gradient has to cross a collective.
    straight_through = inputs.cur_log_probs - inputs.cur_log_probs.detach()
    return _clipped_surrogate(
        inputs.shards.per_token(sequence_log_r) + straight_through, inputs, config
    )


@token_separable
def reinforce(inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    """Plain policy gradient: the base on which `off_policy_is_function` is unbiased.

    loss = -A cur
    Flags: none.
    Reference: Williams 1992 (REINFORCE).
    """
    loss = -inputs.advantages * inputs.cur_log_probs
    return PolicyTerm(loss, inputs.mask, {"pg_clipfrac": torch.zeros_like(inputs.advantages)})


@token_separable
def cispo(inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    """Clips the weight, never the gradient: every token keeps a gradient, through cur alone.

    loss = -sg(clip(r, 1 - eps_clip, 1 + eps_clip_high)) A cur, r = exp(cur - train)
    Flags: --eps-clip 0.2 (1.0 removes the lower bound), --eps-clip-high (= eps-clip).
    Reference: MiniMax 2025 (CISPO, MiniMax-M1).
    """
    low, high = _clip_bounds(config)
    log_r = _cur_over_train(inputs).detach()
    weight = clipped_ratio(log_r, low, high)
    loss = -weight * inputs.advantages * inputs.cur_log_probs
    metrics = {
        "pg_clipfrac": (~inside_band(log_r, low, high)).float(),
        "cispo/ratio_clamped_mean": weight,
    }
    return PolicyTerm(loss, inputs.mask, metrics, extremes={"cispo/ratio": safe_exp(log_r)})


@token_separable
def sapo(inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    """A soft gate in place of the clip, steeper for A <= 0.

    loss = -sigmoid(tau (r - 1)) 4 / tau A, r = exp(cur - train); tau = sapo_tau_pos for A > 0, else
    sapo_tau_neg
    Flags: --sapo-tau-pos 1.0, --sapo-tau-neg 1.05.
    Reference: Gao et al. 2025 (SAPO).
    """
    ratio = safe_exp(_cur_over_train(inputs))
    positive = inputs.advantages > 0
    tau = torch.where(positive, config.sapo_tau_pos, config.sapo_tau_neg)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    closed = (gate.detach() * tau / 4 - 0.5).abs() > 0.45
    return PolicyTerm(-gate * inputs.advantages, inputs.mask, {"pg_clipfrac": closed.float()})


@token_separable
def icepop(inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    """Importance ratio against the rollout policy inside a band; outside, drop the token.

    loss = -keep A r, r = exp(cur - rollout), keep = icepop_ratio_low <= r <= icepop_ratio_high
    Flags: --icepop-ratio-low 0.2, --icepop-ratio-high 5.0, --adv-tau 1.0, --teacher-tau 0.0.
    Reference: Ling team 2025, "Every step evolves" (IcePop).
    """
    log_r = _cur_over_rollout(inputs)
    low, high = config.icepop_ratio_low, config.icepop_ratio_high
    return _masked_surrogate(inputs, config, log_r, *_outside_ratio_band(log_r, low, high))


@token_separable
def dppo_tv(inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    """Importance ratio on tokens whose probability moved little; symmetric, whatever the sign of A.

    loss = -keep A r, r = exp(cur - rollout), keep = -dppo_diff_low <= pi_cur - pi_rollout <=
    dppo_diff_high
    Flags: --dppo-diff-low 0.2, --dppo-diff-high 0.2, --dppo-ratio-cap (none), --adv-tau 1.0,
        --teacher-tau 0.0.
    Reference: Qi et al. 2026 (DPPO, total variation), in the symmetric form of prime-rl.
    """
    log_r = _cur_over_rollout(inputs)
    difference = _probability_shift(inputs)
    too_low = difference < -config.dppo_diff_low - EDGE_TOLERANCE
    too_high = difference > config.dppo_diff_high + EDGE_TOLERANCE
    return _masked_surrogate(inputs, config, log_r, too_low, too_high, cap=config.dppo_ratio_cap)


@token_separable
def dppo(inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    """Drops A > 0 that rose too far and A <= 0 that fell too far; penalizes every token's drift.

    loss = -keep A r + kl_tau log(r)^2, r = exp(cur - rollout), keep = pi_cur - pi_rollout <=
    dppo_mask_high for A > 0, >= -dppo_mask_low else
    Flags: --dppo-mask-low 0.2, --dppo-mask-high 0.2, --kl-tau 0.001, --adv-tau 1.0, --teacher-tau
        0.0.
    Reference: Qi et al. 2026 (DPPO); squared log-ratio penalty as in prime-rl.
    """
    log_r = _cur_over_rollout(inputs)
    difference = _probability_shift(inputs)
    positive = inputs.advantages > 0
    too_high = positive & (difference > config.dppo_mask_high + EDGE_TOLERANCE)
    too_low = ~positive & (difference < -config.dppo_mask_low - EDGE_TOLERANCE)
    term = _masked_surrogate(inputs, config, log_r, too_low, too_high)
    return replace(term, loss=term.loss + config.kl_tau * log_r.square())


@token_separable
def ipo_kl(inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    """IcePop's band with a drift penalty that acts on kept tokens only.

    loss = keep (-A r + kl_tau log(r)^2), r = exp(cur - rollout), keep = ipo_ratio_low <= r <=
    ipo_ratio_high
    Flags: --ipo-ratio-low 0.2, --ipo-ratio-high 5.0, --kl-tau 0.001, --adv-tau 1.0, --teacher-tau
        0.0.
    Reference: Prime Intellect 2025, prime-rl (masked ratio with a squared log-ratio penalty).
    """
    log_r = _cur_over_rollout(inputs)
    outside = _outside_ratio_band(log_r, config.ipo_ratio_low, config.ipo_ratio_high)
    term = _masked_surrogate(inputs, config, log_r, *outside)
    penalty = torch.where(term.kept, config.kl_tau * log_r.square(), 0.0)
    return replace(term, loss=term.loss + penalty)


def _cur_over_train(inputs: LossInputs) -> Tensor:
    return log_ratio(inputs.cur_log_probs, inputs.train_log_probs, inputs.mask)


def _cur_over_rollout(inputs: LossInputs) -> Tensor:
    return log_ratio(inputs.cur_log_probs, inputs.require_rollout(), inputs.mask)


def _probability_shift(inputs: LossInputs) -> Tensor:
    return probability_difference(inputs.cur_log_probs, inputs.require_rollout(), inputs.mask)


def _clip_bounds(config: LossConfig) -> tuple[float, float]:
    return max(0.0, 1.0 - config.eps_clip), 1.0 + config.clip_high


def _clipped_surrogate(log_r: Tensor, inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    ratio = safe_exp(log_r)
    low, high = _clip_bounds(config)
    unclipped = -ratio * inputs.advantages
    clipped = -ratio.clamp(low, high) * inputs.advantages
    loss = torch.maximum(unclipped, clipped)
    if config.eps_clip_c is not None:
        bounded = torch.minimum(loss, -config.eps_clip_c * inputs.advantages)
        loss = torch.where(inputs.advantages < 0, bounded, loss)
    return PolicyTerm(loss, inputs.mask, {"pg_clipfrac": (clipped > unclipped).float()})


def _outside_ratio_band(log_r: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    outside = ~inside_band(log_r, low, high)
    below = log_r.detach() < log_bound(low)
    return outside & below, outside & ~below


def _masked_surrogate(
    inputs: LossInputs,
    config: LossConfig,
    log_r: Tensor,
    too_low: Tensor,
    too_high: Tensor,
    cap: float | None = None,
) -> PolicyTerm:
    """-A r on the tokens inside the band; A is scaled and joined by the teacher."""
    kept = inputs.mask & ~(too_low | too_high)
    # Selecting the log-ratio before exp keeps a dropped token's huge ratio out of value and
    # gradient.
    ratio = safe_exp(torch.where(kept, log_r, 0.0))
    if cap is not None:
        ratio = ratio.clamp(max=cap)
    # adv_tau A + teacher_tau sg(teacher - cur)
    advantages = config.adv_tau * inputs.advantages
    if config.teacher_tau and inputs.teacher_log_probs is not None:
        gap = inputs.teacher_log_probs - inputs.cur_log_probs.detach()
        advantages = advantages + config.teacher_tau * gap
    loss = torch.where(kept, -advantages * ratio, 0.0)
    metrics = {
        "is_masked": (inputs.mask & ~kept).float(),
        "is_masked_low": (inputs.mask & too_low).float(),
        "is_masked_high": (inputs.mask & too_high).float(),
    }
    weight = torch.where(kept, ratio.detach(), 0.0)
    return PolicyTerm(loss, kept, metrics, ratio=safe_exp(log_r.detach()), weight=weight)


PolicyLoss = Callable[[LossInputs, LossConfig], PolicyTerm]
#: The built-in losses; what the configuration knows of them is in
#: `plugin.config.policy_loss_traits`.
POLICY_LOSSES: dict[str, PolicyLoss] = {
    function.__name__: function
    for function in (ppo, reinforce, cispo, gspo, icepop, dppo_tv, dppo, ipo_kl, sapo)
}


@lru_cache(maxsize=64)
def resolve_policy_loss(name: str) -> PolicyLoss:
    """Return a built-in loss, or load the one at an import path and try it on example tokens."""
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    function = load_called_with("--policy-loss", name, "inputs", "config")
    contract = (
        f"--policy-loss {name} must be fn(inputs: LossInputs, config: LossConfig) -> PolicyTerm"
    )
    inputs = example_inputs()
    with torch.enable_grad():
        term = function(inputs, LossConfig(policy_loss=name))
    if not isinstance(term, PolicyTerm):
        raise HookLoadError(f"{contract}; it returned a {type(term).__name__}")
    for field, values in {"loss": term.loss, "kept": term.kept, **term.metrics}.items():
        if not isinstance(values, Tensor) or values.shape != inputs.mask.shape:
            raise HookLoadError(f"{contract}; its {field} is not one value per token, [T]")
    if not term.loss.requires_grad:
        raise HookLoadError(f"{contract}; its loss has no gradient, so nothing would be learned")
    return function
