"""Reference KL, rollout KL, distillation and entropy. A correction's mask does not thin them."""

from __future__ import annotations

from torch import Tensor

from plugin.config import LossConfig
from plugin.errors import ConfigError
from plugin.loss.interfaces import LossInputs, RegularizerTerm
from plugin.ppo_utils.importance_ratio import log_ratio, safe_exp
from plugin.ppo_utils.kl_estimators import LOW_VAR_KL_BOUND, kl_estimate


def regularizer_terms(
    inputs: LossInputs, config: LossConfig, kept: Tensor
) -> tuple[RegularizerTerm, ...]:
    """Return the configured terms; one with coefficient 0 is a metric without a graph."""
    terms = []
    if inputs.entropy is not None:
        terms.append(RegularizerTerm("entropy_loss", -config.entropy_coef, inputs.entropy))
    if config.use_kl_loss:
        values = reference_kl(inputs, config)
        terms.append(RegularizerTerm("kl_loss", config.kl_loss_coef, values))
    if config.use_rollout_kl_loss:
        values = rollout_kl(inputs, config, kept)
        terms.append(RegularizerTerm("rollout_kl", config.rollout_kl_loss_coef, values))
    if inputs.distill_kl is not None:
        values = _with_gradient_if(config.distill_coef, inputs.distill_kl)
        terms.append(RegularizerTerm("distill_kl", config.distill_coef, values))
    return tuple(terms)


def reference_kl(inputs: LossInputs, config: LossConfig) -> Tensor:
    """KL of the current from the reference policy [T], over every real token.

    With --use-unbiased-kl it is weighted by exp(cur - proximal), through which its gradient flows
    too.
    """
    if inputs.ref_log_probs is None:
        raise ConfigError(
            "--use-kl-loss needs ref_log_probs and the batch has none; give a reference model or "
            "drop it"
        )
    cur = _with_gradient_if(config.kl_loss_coef, inputs.cur_log_probs)
    bounded = config.kl_loss_type == "low_var_kl"
    estimator = "k3" if bounded else config.kl_loss_type
    values = kl_estimate(cur, inputs.ref_log_probs, inputs.mask, estimator)
    if config.use_unbiased_kl:
        values = values * safe_exp(log_ratio(cur, inputs.proximal_log_probs, inputs.mask))
    return values.clamp(max=LOW_VAR_KL_BOUND) if bounded else values


def rollout_kl(inputs: LossInputs, config: LossConfig, kept: Tensor) -> Tensor:
    """KL between the current and the rollout policy [T], with gradient through the current one."""
    cur = _with_gradient_if(config.rollout_kl_loss_coef, inputs.cur_log_probs)
    scope = kept if config.rollout_kl_scope == "kept" else inputs.mask
    return kl_estimate(cur, inputs.require_rollout(), scope, config.rollout_kl_estimator_type)


def _with_gradient_if(coefficient: float, values: Tensor) -> Tensor:
    return values if coefficient else values.detach()
