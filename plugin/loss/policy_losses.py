"""The policy losses: one small function each, from `LossInputs` to a `PolicyTerm`.

Notation: cur, proximal, rollout are log-probs; r is a ratio; A the advantage; sg the stop-gradient.
Inputs are 0 where masked, so every per-token loss is 0 there too. Losses that compare with the
rollout policy are in `rollout_losses`.

Each docstring is the entry of its loss in `megatron-tis corrections`: a sentence, the formula, the
flags with their defaults, the reference.

The loss of a value model, which is no choice of --policy-loss, is the last.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from plugin.config import LossConfig
from plugin.config.import_paths import load_called_with
from plugin.errors import HookLoadError
from plugin.loss.interfaces import LossInputs, PolicyTerm, declared_values, example_inputs
from plugin.loss.rollout_losses import (
    dppo,
    dppo_kl,
    dppo_tv,
    dro,
    icepop,
    ipo_kl,
    ipo_tv,
    minpro,
    topr,
    vespo,
)
from plugin.ppo_utils.batch_statistics import (
    Declaration,
    Statistics,
    batch_statistics,
    microbatch_statistics,
)
from plugin.ppo_utils.correction_interface import token_separable
from plugin.ppo_utils.covariance import (
    among_largest,
    clip_cov_chance,
    clip_cov_rounds,
    covariances,
    hashed_uniform,
    inside_cov_band,
    kl_cov_rounds,
)
from plugin.ppo_utils.importance_ratio import (
    clipped_ratio,
    geometric_log_ratio,
    inside_band,
    log_ratio,
    safe_exp,
)
from plugin.ppo_utils.masked_ops import zero_masked


@token_separable
def ppo(inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    """Clipped surrogate: no gain from moving a token's ratio beyond the clip.

    loss = max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A), r = exp(cur - proximal); for
    A < 0 at most -eps_clip_c A
    Flags: --eps-clip 0.2, --eps-clip-high (= eps-clip), --eps-clip-c (none).
    Reference: Schulman et al. 2017 (PPO); Ye et al. 2020 (dual clip).
    """
    return _clipped_surrogate(_cur_over_proximal(inputs), inputs, config)


def gspo(inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    """PPO's clip on the ratio of the whole sequence; each token passes its own gradient.

    loss = max(-s A, -clip(s, 1 - eps_clip, 1 + eps_clip_high) A), s = exp(mean(cur - proximal))
    Flags: --eps-clip 0.2, --eps-clip-high (= eps-clip), --eps-clip-c (none). The paper's bounds are
        3e-4 and 4e-4.
    Reference: Zheng et al. 2025 (GSPO).
    """
    return _clipped_surrogate(_sequence_mean(_cur_over_proximal(inputs), inputs), inputs, config)


def gmpo(inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    """The geometric mean of a sequence's ratios, each clipped on the side that A pushes it to.

    loss = -exp(mean(c)) A, c = min(log r, eps_clip_high) for A >= 0, max(log r, -eps_clip) else;
    r = exp(cur - proximal); each token passes its own gradient
    Flags: --eps-clip 0.2, --eps-clip-high (= eps-clip), both of log r. The paper's are 0.4.
    Reference: Zhao et al. 2025 (GMPO), arXiv 2507.20673; the clip as in verl.
    """
    log_r = _cur_over_proximal(inputs)
    rising = log_r.clamp(max=config.clip_high)
    clipped = torch.where(inputs.advantages >= 0, rising, log_r.clamp(min=-config.eps_clip))
    loss = -safe_exp(_sequence_mean(clipped, inputs)) * inputs.advantages
    return PolicyTerm(loss, inputs.mask, {"pg_clipfrac": (clipped != log_r).float()})


@token_separable
@batch_statistics(clip_cov_rounds)
def clip_cov(inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    """PPO without a few of the tokens that lower the entropy most: those of large covariance.

    loss = PPO's, 0 for clip_cov_ratio of the batch's tokens, drawn from those with clip_cov_low <
    cov < clip_cov_high; cov = (A - mean A) (proximal - mean proximal), means over the batch
    Flags: --clip-cov-ratio 2e-4, --clip-cov-low 1.0, --clip-cov-high 5.0, --eps-clip 0.2,
        --eps-clip-high (= eps-clip). A token that PPO has clipped is not dropped. The draw is a
        hash of the token's numbers; verl draws anew and takes the current log-probs.
    Reference: Cui et al. 2025 (Clip-Cov), arXiv 2505.22617; as in verl.
    """
    term = _clipped_surrogate(_cur_over_proximal(inputs), inputs, config)
    known = _batch_statistics("clip_cov", clip_cov_rounds, inputs, config)
    covariance = covariances(inputs.proximal_log_probs, inputs.advantages, known[0])
    drawn = hashed_uniform(inputs.proximal_log_probs, inputs.advantages)
    drawn = inside_cov_band(covariance, config) & (drawn < clip_cov_chance(known, config))
    dropped = inputs.mask & drawn & (term.metrics["pg_clipfrac"] == 0)
    metrics = term.metrics | {
        "is_masked": dropped.float(),
        "covariance": torch.where(inputs.mask, covariance, 0.0),
    }
    loss = torch.where(dropped, 0.0, term.loss)
    return PolicyTerm(loss, inputs.mask & ~dropped, metrics)


@token_separable
@batch_statistics(kl_cov_rounds)
def kl_cov(inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    """No clip, and a pull to the old policy on the tokens that lower the entropy most.

    loss = -r A, plus kl_cov_coef |cur - proximal| for the kl_cov_ratio of the batch's tokens with
    the largest cov = (A - mean A) (proximal - mean proximal); r = exp(cur - proximal)
    Flags: --kl-cov-ratio 2e-4, --kl-cov-coef 1.0. At least one token, equal ones together. On the
        first update on a rollout the pull has no gradient. verl takes the current log-probs.
    Reference: Cui et al. 2025 (KL-Cov), arXiv 2505.22617; as in verl.
    """
    log_r = _cur_over_proximal(inputs)
    known = _batch_statistics("kl_cov", kl_cov_rounds, inputs, config)
    covariance = covariances(inputs.proximal_log_probs, inputs.advantages, known[0])
    pulled = inputs.mask & among_largest(covariance, known, config)
    metrics = {
        "pg_clipfrac": torch.zeros_like(log_r),
        "kl_cov_pulled": pulled.float(),
        "covariance": torch.where(inputs.mask, covariance, 0.0),
    }
    pull = torch.where(pulled, config.kl_cov_coef * log_r.abs(), 0.0)
    loss = -safe_exp(log_r) * inputs.advantages
    return PolicyTerm(loss, inputs.mask, metrics, penalty=pull)


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

    loss = -sg(clip(r, 1 - eps_clip, 1 + eps_clip_high)) A cur, r = exp(cur - proximal)
    Flags: --eps-clip 0.2 (1.0 removes the lower bound), --eps-clip-high (= eps-clip).
    Reference: MiniMax 2025 (CISPO, MiniMax-M1).
    """
    low, high = _clip_bounds(config)
    log_r = _cur_over_proximal(inputs).detach()
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

    loss = -sigmoid(tau (r - 1)) 4 / tau A, r = exp(cur - proximal); tau = sapo_tau_pos for A > 0,
    else sapo_tau_neg
    Flags: --sapo-tau-pos 1.0, --sapo-tau-neg 1.05.
    Reference: Gao et al. 2025 (SAPO).
    """
    ratio = safe_exp(_cur_over_proximal(inputs))
    positive = inputs.advantages > 0
    tau = torch.where(positive, config.sapo_tau_pos, config.sapo_tau_neg)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    closed = (gate.detach() * tau / 4 - 0.5).abs() > 0.45
    return PolicyTerm(-gate * inputs.advantages, inputs.mask, {"pg_clipfrac": closed.float()})


def _batch_statistics(
    name: str, declaration: Declaration, inputs: LossInputs, config: LossConfig
) -> Statistics:
    """What a loss declared of the whole batch; of this microbatch where only that is known."""
    if inputs.statistics is not None and name in inputs.statistics:
        return inputs.statistics[name]
    with torch.no_grad():
        values, group = declared_values(declaration, inputs), inputs.shards.context.cp_group
        return microbatch_statistics(declaration, values, config, group)


def _sequence_mean(token_log_r: Tensor, inputs: LossInputs) -> Tensor:
    """[T]: the mean over the sequence as a value, the token's own as a gradient.

    So no gradient has to cross a collective.
    """
    mean = geometric_log_ratio(token_log_r, inputs.mask, inputs.shards)
    return inputs.shards.per_token(mean) + token_log_r - token_log_r.detach()


def _cur_over_proximal(inputs: LossInputs) -> Tensor:
    return log_ratio(inputs.cur_log_probs, inputs.proximal_log_probs, inputs.mask)


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


PolicyLoss = Callable[[LossInputs, LossConfig], PolicyTerm]
#: The built-in losses; what the configuration knows of them is in
#: `plugin.config.loss.policy_loss`.
POLICY_LOSSES: dict[str, PolicyLoss] = {
    function.__name__: function
    for function in (
        *(ppo, reinforce, cispo, gspo, icepop, dppo_tv, dppo, ipo_kl, sapo),
        *(dppo_kl, vespo, topr, dro, minpro, gmpo, ipo_tv, clip_cov, kl_cov),
    )
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


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Loss [T], 0 where masked, and whether each token's value was clipped, bool [T].

    max((v - R)^2, (old + clamp(v - old, -clip, clip) - R)^2) / 2: a value that has gone further
    than `clip` from where it was is not pushed on (PPO). Without `clip`, half the squared error.

    values: [T] with gradient; old_values, returns: [T]; mask: [T] bool
    """
    values, old, returns = (zero_masked(x, mask) for x in (values, old_values, returns))
    error = (values - returns).square()
    if clip is None:
        return 0.5 * error, torch.zeros_like(mask)
    near = old + (values - old).clamp(-clip, clip)
    clipped = (near - returns).square()
    # Inside the clip the two differ by rounding alone.
    left = (values - old).abs() > clip
    return 0.5 * torch.maximum(error, clipped), left & (clipped > error)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns), in float64; 0 where the returns do not vary.

    1 = the values predict every return, 0 = no better than their mean, below 0 = worse.
    """
    wanted, error = returns.double(), (returns.double() - values.double())
    if wanted.numel() < 2 or float(wanted.var()) == 0.0:
        return 0.0
    return float(1.0 - error.var() / wanted.var())
