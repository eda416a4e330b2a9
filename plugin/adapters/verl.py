"""verl: policy losses for its registry, and correction weights for its rollout correction.

In a module that verl loads in its workers (`actor_rollout_ref.model.external_lib=my_losses`):

    from plugin.adapters import verl as adapter
    from plugin.config import LossConfig

    adapter.register("tis_icepop", LossConfig(policy_loss="icepop"), old_is_rollout=True)

and `actor_rollout_ref.actor.policy_loss.loss_mode=tis_icepop`. verl passes one set of old log-probs
to a policy loss. They are the trainer's by default and the engine's in bypass mode
(`algorithm.rollout_correction.bypass_mode=true`): then pass `old_is_rollout=True`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from plugin.adapters.padded_loss import PaddedBatch, padded_loss
from plugin.config import LossConfig
from plugin.errors import ConfigError
from plugin.loss.hook_chain import hook_chain
from plugin.loss.interfaces import PolicyTerm
from plugin.ppo_utils import ParallelContext, masked_mean, use_parallel_context

PolicyLoss = Callable[..., tuple[Tensor, dict[str, Any]]]


def register(name: str, config: LossConfig, *, old_is_rollout: bool = False) -> PolicyLoss:
    """Register the loss that `config` describes as `name` among verl's policy losses."""
    from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss

    return register_policy_loss(name)(policy_loss(config, agg_loss, old_is_rollout=old_is_rollout))


def policy_loss(
    config: LossConfig, agg_loss: Callable[..., Tensor], *, old_is_rollout: bool = False
) -> PolicyLoss:
    """A function with the signature of verl's policy losses; `agg_loss` is verl's own reduction."""
    needing = config.needs_rollout_log_probs()
    if needing and not old_is_rollout:
        raise ConfigError(
            f"{', '.join(needing)} needs the engine's log-probs, and verl passes them to a policy "
            "loss only in bypass mode; set algorithm.rollout_correction.bypass_mode=true and pass "
            "old_is_rollout=True"
        )
    # `config` is also the name of an argument that verl passes.
    loss_config = config

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        batch = PaddedBatch(
            log_prob,
            response_mask,
            advantages,
            train_log_probs=old_log_prob,
            rollout_log_probs=old_log_prob if old_is_rollout else None,
        )
        settings = {} if config is None else dict(config.global_batch_info)

        def reduce(values: Tensor) -> Tensor:
            return agg_loss(
                loss_mat=values, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **settings
            )

        value, metrics = padded_loss(loss_config, batch, reduce, weights=rollout_is_weights)
        return value, {f"actor/{name}": metric.item() for name, metric in metrics.items()}

    return loss


def rollout_correction(
    config: LossConfig, old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Weights [B, R], response mask [B, R] and metrics of the correction hooks that `config` names.

    With `--loss-denominator original` a rejected token stays in the mask with weight 0; with `kept`
    it is removed from the mask, as verl's own rejection does.
    """
    config = config if config.use_tis else replace(config, use_tis=True)
    with use_parallel_context(ParallelContext()), torch.no_grad():
        inputs = PaddedBatch(
            old_log_prob,
            response_mask,
            torch.zeros_like(old_log_prob),
            train_log_probs=old_log_prob,
            rollout_log_probs=rollout_log_prob,
        ).inputs(config)
        term = PolicyTerm(torch.where(inputs.mask, 1.0, 0.0), inputs.mask)
        found = hook_chain(config).apply(config, term, inputs, with_weights=True)
    assert found.ratio is not None and found.weight is not None
    shape = response_mask.shape
    mask = response_mask
    if config.loss_denominator == "kept":
        mask = torch.where(found.kept.reshape(shape), response_mask, 0)
    metrics = {
        "rollout_corr/ratio_mean": masked_mean(found.ratio, inputs.mask).item(),
        "rollout_corr/weight_mean": masked_mean(found.weight, inputs.mask).item(),
        "rollout_corr/rejected": masked_mean((~found.kept).float(), inputs.mask).item(),
    }
    return found.weight.reshape(shape), mask, metrics


def install_rollout_correction(config: LossConfig) -> None:
    """Replace the rollout correction of verl's trainers by the one of `config`.

    verl has no registry for this step: its trainers look the function up by name in a module, so
    that is where it is replaced. verl takes the step only if
    `algorithm.rollout_correction.rollout_is` is set.
    """
    from verl import DataProto
    from verl.trainer.ppo import rollout_corr_helper

    def correct(batch: Any, rollout_corr_config: Any) -> tuple[Any, dict[str, float]]:
        columns = batch.batch
        weights, mask, metrics = rollout_correction(
            config, columns["old_log_probs"], columns["rollout_log_probs"], columns["response_mask"]
        )
        columns["response_mask"] = mask
        added = DataProto.from_dict(tensors={"rollout_is_weights": weights})
        return batch.union(added), metrics

    name = "compute_rollout_correction_and_add_to_batch"
    setattr(rollout_corr_helper, name, correct)
    user = sys.modules.get("verl.trainer.ppo.v1.trainer_base")
    if user is not None:
        setattr(user, name, correct)
