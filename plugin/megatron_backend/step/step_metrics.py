"""What a training step records about itself, as sufficient statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from plugin.config import TrainerConfig
from plugin.errors import BatchError
from plugin.loss.interfaces import LossInputs, LossOutputs
from plugin.loss.normalization import token_weights
from plugin.ppo_utils.importance_ratio import MAX_LOG_RATIO, log_ratio
from plugin.ppo_utils.mismatch_metrics import record_mismatch, summarize
from plugin.ppo_utils.sufficient_statistics import StatisticsTable
from plugin.ragged import Ragged


def record_step(
    table: StatisticsTable,
    config: TrainerConfig,
    inputs: LossInputs,
    outputs: LossOutputs,
    weights: Tensor,
    columns: Mapping[str, Any],
) -> None:
    """Add one microbatch to the step's table.

    Losses are weighted with the weights [T] of the loss itself and divided as it is; every other
    metric is a mean over tokens.
    """
    own = StatisticsTable(table.device)
    with torch.no_grad():
        counted = weights
        if config.reduction == "fixed-length":
            # Weights by a constant add up to nothing in particular: the samples are counted.
            counted = token_weights(inputs.shards, inputs.mask, inputs.loss_masks, per_token=False)
        kept_only = config.loss_denominator == "kept" and config.per_token
        loss_weight = counted * outputs.denominator if kept_only else counted
        _add_weighted(own, "loss", outputs.total, weights, loss_weight)
        _add_weighted(own, "pg_loss", outputs.policy_loss, weights, loss_weight)
        for term in outputs.regularizers:
            _add_weighted(own, term.name, term.values, weights, counted)
        for name, metric in outputs.metrics.items():
            own.add_mean(name, metric.values, metric.over)
        for name, values in outputs.policy.extremes.items():
            own.add_extremes(name, values, inputs.mask)
        own.add("num_tokens", inputs.mask.sum())
        if config.train_log_probs == "approximate" and columns.get("log_probs") is not None:
            off = (inputs.proximal_log_probs - inputs.train_log_probs).abs()
            own.add_mean("old_log_prob_error", off, inputs.mask)
        if inputs.rollout_log_probs is not None:
            versions, current = columns.get("weight_versions"), columns.get("trainer_version")
            staleness = None
            if versions is not None and current is not None:
                sampled = Ragged.of(versions).values.to(inputs.mask.device)
                staleness = (current - sampled).clamp(min=0)
            record_mismatch(
                own,
                mask=inputs.mask,
                train_log_probs=inputs.compared_with_rollout(config),
                rollout_log_probs=inputs.rollout_log_probs,
                position=inputs.shards.positions,
                cur_log_probs=inputs.cur_log_probs,
                staleness=staleness,
                advantages=inputs.advantages,
                kept=outputs.policy.kept,
                weights=outputs.policy.weight,
                correction_ratio=outputs.policy.ratio,
            )
            _record_sequences(own, inputs, config)
    _check_same_cells(table, own)
    table.merge(own)


def _record_sequences(table: StatisticsTable, inputs: LossInputs, config: TrainerConfig) -> None:
    """Add the chi^2 of whole responses: the mean square of their ratios, less 1.

    One collective under context parallelism, whose ranks then count every sample alike.
    """
    train, rollout = inputs.compared_with_rollout(config), inputs.require_rollout()
    log_r, count = inputs.shards.sequence_sums(log_ratio(train, rollout, inputs.mask), inputs.mask)
    chi2 = torch.expm1(2 * log_r.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    table.add_mean("mismatch/sequence_chi2", chi2, count > 0)


def _check_same_cells(before: StatisticsTable, own: StatisticsTable) -> None:
    """Refuse a metric that only some microbatches record: its mean would depend on the cut."""
    if not before.sums or before.digest() == own.digest():
        return
    names = {
        name.removesuffix(":sum").removesuffix(":count") for name in before.sums.keys() ^ own.sums
    }
    raise BatchError(
        f"microbatches of one step recorded different metrics ({', '.join(sorted(names))}); a hook "
        "must return the same metric names for every microbatch, also for one without an unmasked "
        "token"
    )


def step_metrics(table: StatisticsTable) -> dict[str, float]:
    """Metrics of a reduced table."""
    metrics = {**table.means(), **summarize(table)}
    metrics["num_tokens"] = float(table.sums.get("num_tokens", torch.zeros(())))
    return metrics


def _add_weighted(
    table: StatisticsTable, name: str, values: Tensor, weights: Tensor, denominator: Tensor
) -> None:
    table.add(f"{name}:sum", (torch.where(weights > 0, values, 0.0).double() * weights).sum())
    table.add(f"{name}:count", denominator.double().sum())
