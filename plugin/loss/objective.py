"""The objective: policy loss with corrections, plus regularizers, over which denominator.

Every caller (the training closures, the separable LM head, `policy_loss_function`, the adapters)
gets its per-token loss here and only decides how to sum it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from plugin.config import LossConfig
from plugin.config.flags import expect
from plugin.config.import_paths import try_on_example
from plugin.errors import ConfigError
from plugin.loss.hook_chain import batch_declarations, hook_chain
from plugin.loss.interfaces import LossInputs, LossOutputs, RegularizerTerm, TokenMetric
from plugin.loss.normalization import kept_token_scale
from plugin.loss.policy_losses import resolve_policy_loss
from plugin.loss.score_centering import score_centering
from plugin.ppo_utils.importance_ratio import LOW_VAR_KL_BOUND, k3, kl_estimate, log_ratio, safe_exp


def check_loss(config: LossConfig) -> None:
    """Load, check and try whatever the configuration names by import path."""
    failed = "failed on an example of 2 samples"
    what = f"--policy-loss {config.policy_loss} {failed}"
    try_on_example(what, resolve_policy_loss, config.policy_loss)
    if config.use_tis or config.get_mismatch_metrics:
        what = f"--custom-tis-function-path {','.join(config.hook_names())} {failed}"
        try_on_example(what, hook_chain, config)
    declared = ", ".join(batch_declarations(config))
    expect(
        not declared or config.train_log_probs == "recompute",
        f"{declared} needs the trainer's log-probs of the whole batch before the training pass, "
        f"and --train-log-probs {config.train_log_probs} has none; use --train-log-probs recompute",
    )


def compute_loss(
    config: LossConfig,
    inputs: LossInputs,
    *,
    args: Any = None,
    policy_weights: Tensor | None = None,
    with_weights: bool = False,
    with_metrics: bool = True,
) -> LossOutputs:
    """Compute the objective of every token.

    args: the namespace that hooks receive; None = `config`
    policy_weights: [T] correction weights that the caller has computed itself
    with_weights: also report what the corrections did to each token, in `policy.ratio` and
        `policy.weight`
    """
    args = config if args is None else args
    term = resolve_policy_loss(config.policy_loss)(inputs, config)
    if config.use_tis:
        chain = hook_chain(config, args)
        term = chain.apply(args, term, inputs, with_weights=with_weights)
    elif config.get_mismatch_metrics and with_metrics:
        # The mismatch is that of the trainer's own log-probs, whatever the ratio is taken against.
        of_trainer = replace(inputs, proximal_log_probs=inputs.train_log_probs)
        with torch.no_grad():
            observed = hook_chain(config, args).apply(args, term, of_trainer)
        term = replace(term, metrics=observed.metrics | term.metrics)
    if policy_weights is not None:
        weights = torch.where(inputs.mask, policy_weights.detach().float(), 0.0)
        term = replace(term, loss=term.loss * weights)
    if config.score_centering_topk:
        centering = score_centering(inputs, config, args)
        metrics_of_term = term.metrics | centering.metrics
        term = replace(term, loss=term.loss + centering.loss, metrics=metrics_of_term)
    if term.penalty is not None:
        term = replace(term, loss=term.loss + term.penalty)
    policy, denominator = term.loss, inputs.mask
    if config.loss_denominator == "kept":
        if config.per_token:
            denominator = term.kept
        else:
            policy = policy * kept_token_scale(term.kept, inputs.mask, inputs.shards)
    regularizers = regularizer_terms(inputs, config, term.kept)
    total = policy
    for regularizer in regularizers:
        if regularizer.coefficient:
            total = total + regularizer.coefficient * regularizer.values
    metrics: dict[str, TokenMetric] = {}
    if with_metrics:
        metrics = {name: TokenMetric(v.detach(), inputs.mask) for name, v in term.metrics.items()}
        metrics |= _comparison_metrics(inputs, term.kept)
    return LossOutputs(term, regularizers, policy, total, denominator, metrics)


def _comparison_metrics(inputs: LossInputs, kept: Tensor) -> dict[str, TokenMetric]:
    """How far the policies are from each other."""
    mask, cur = inputs.mask, inputs.cur_log_probs.detach()
    cur_over_proximal = log_ratio(cur, inputs.proximal_log_probs, mask)
    metrics = {
        "ppo_kl": TokenMetric(-cur_over_proximal, mask),
        "ois": TokenMetric(safe_exp(cur_over_proximal), mask),
    }
    if inputs.teacher_log_probs is not None:
        metrics["teacher_kl"] = TokenMetric(log_ratio(cur, inputs.teacher_log_probs, mask), mask)
    if inputs.rollout_log_probs is None:
        return metrics
    train_over_rollout = log_ratio(inputs.train_log_probs, inputs.rollout_log_probs, mask)
    mismatch = k3(log_ratio(inputs.rollout_log_probs, cur, mask))
    metrics |= {
        "train_rollout_logprob_abs_diff": TokenMetric(train_over_rollout.abs(), mask),
        "mismatch_kl": TokenMetric(mismatch, mask),
        "masked_mismatch_kl": TokenMetric(mismatch, mask & ~kept),
        "unmasked_mismatch_kl": TokenMetric(mismatch, kept),
    }
    return metrics


def regularizer_terms(
    inputs: LossInputs, config: LossConfig, kept: Tensor
) -> tuple[RegularizerTerm, ...]:
    """Return the configured terms; one with coefficient 0 is a metric without a graph.

    kept: bool [T], what the corrections keep; of these terms only the rollout KL may look at it
    """
    terms = []

    def add(name: str, coefficient: float, values: Tensor) -> None:
        values = values if coefficient else values.detach()
        terms.append(RegularizerTerm(name, coefficient, values))

    if inputs.entropy is not None:
        add("entropy_loss", -config.entropy_coef, inputs.entropy)
    if config.use_kl_loss:
        add("kl_loss", config.kl_loss_coef, reference_kl(inputs, config))
    if config.use_rollout_kl_loss:
        scope = kept if config.rollout_kl_scope == "kept" else inputs.mask
        estimator = config.rollout_kl_estimator_type
        values = kl_estimate(inputs.cur_log_probs, inputs.require_rollout(), scope, estimator)
        add("rollout_kl", config.rollout_kl_loss_coef, values)
    if config.positive_nll_coef:
        likelihood = torch.where(inputs.advantages > 0, inputs.cur_log_probs, 0.0)
        add("positive_nll", config.positive_nll_coef, -likelihood)
    if inputs.distill_kl is not None:
        add("distill_kl", config.distill_coef, inputs.distill_kl)
    return tuple(terms)


def reference_kl(inputs: LossInputs, config: LossConfig) -> Tensor:
    """KL of the current from the reference policy [T], over every real token.

    With --use-unbiased-kl it is weighted by exp(cur - proximal), or against the rollout policy,
    which its gradient flows through as well.
    """
    if inputs.ref_log_probs is None:
        raise ConfigError(
            "--use-kl-loss needs ref_log_probs and the batch has none; give a reference model or "
            "drop it"
        )
    cur, bounded = inputs.cur_log_probs, config.kl_loss_type == "low_var_kl"
    estimator = "k3" if bounded else config.kl_loss_type
    values = kl_estimate(cur, inputs.ref_log_probs, inputs.mask, estimator)
    if config.use_unbiased_kl:
        against = inputs.proximal_log_probs
        if config.unbiased_kl_against == "rollout":
            against = inputs.require_rollout()
        values = values * safe_exp(log_ratio(cur, against, inputs.mask))
    return values.clamp(max=LOW_VAR_KL_BOUND) if bounded else values
