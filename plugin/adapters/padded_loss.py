"""The loss over padded matrices [B, R], the form in which verl, SkyRL and TRL hold a batch.

Padding is masked, and what is masked is never computed with, so a padded matrix is a batch of
samples that all have a response of R tokens. The framework's own reduction is passed in and decides
about denominators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from plugin.config import LossConfig
from plugin.errors import BatchError, ConfigError
from plugin.loss import LossInputs, compute_loss, loss_inputs, reduce_loss
from plugin.ppo_utils import (
    ParallelContext,
    masked_max,
    masked_mean,
    masked_min,
    use_parallel_context,
)

MatrixReducer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PaddedBatch:
    """One microbatch of a framework that pads.

    cur_log_probs: [B, R] with gradient; mask: [B, R], not 0 where a token counts
    advantages: [B, R], [B, 1] or [B]
    train_log_probs (None = cur, detached), rollout_log_probs, ref_log_probs, teacher_log_probs,
    entropy: [B, R]
    """

    cur_log_probs: Tensor
    mask: Tensor
    advantages: Tensor
    train_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    teacher_log_probs: Tensor | None = None
    entropy: Tensor | None = None

    def inputs(self, config: LossConfig) -> LossInputs:
        """Flat, checked, 0 where masked: the tokens of row 0, then of row 1, and so on."""
        shape = self.cur_log_probs.shape
        if len(shape) != 2 or self.mask.shape != shape:
            raise BatchError(
                f"log-probs have shape {tuple(shape)} and the mask {tuple(self.mask.shape)}; both "
                "must be [B, R]"
            )
        rows, width = shape
        advantages = self.advantages if self.advantages.dim() == 2 else self.advantages[:, None]
        columns: dict[str, Any] = {
            # One token before the response stands for the prompt: only its existence matters here.
            "total_lengths": [width + 1] * rows,
            "response_lengths": [width] * rows,
            "loss_masks": list((self.mask != 0).long().unbind(0)),
            "advantages": list(advantages.expand(shape).unbind(0)),
        }
        for name, values in (
            ("log_probs", self.train_log_probs),
            ("rollout_log_probs", self.rollout_log_probs),
            ("ref_log_probs", self.ref_log_probs),
            ("teacher_log_probs", self.teacher_log_probs),
        ):
            if values is not None:
                columns[name] = list(values.unbind(0))
        entropy = None if self.entropy is None else self.entropy.reshape(-1)
        return loss_inputs(config, columns, self.cur_log_probs.reshape(-1), entropy)


def padded_loss(
    config: LossConfig,
    batch: PaddedBatch,
    reduce: MatrixReducer,
    *,
    weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The scalar loss, and the mean over tokens of every metric.

    reduce: the framework's reduction of per-token values [B, R], which are 0 where masked
    weights: [B, R] the framework's own correction weights, applied to the policy loss
    """
    if weights is not None and config.use_tis:
        raise ConfigError(
            "the framework passes its own correction weights and --use-tis is on, so the "
            "mismatch would be counted twice; turn one of the two off"
        )
    # The matrices are whole, also where the framework splits sequences over context parallel ranks.
    with use_parallel_context(ParallelContext()):
        inputs = batch.inputs(config)
        flat_weights = None if weights is None else weights.reshape(-1)
        outputs = compute_loss(config, inputs, policy_weights=flat_weights)
        shape = batch.cur_log_probs.shape
        loss, _ = reduce_loss(config, outputs, lambda values: reduce(values.reshape(shape)))
    metrics = {
        name: masked_mean(metric.values, metric.over) for name, metric in outputs.metrics.items()
    }
    for name, values in outputs.policy.extremes.items():
        metrics[f"{name}_max"] = masked_max(values.detach(), inputs.mask)
        metrics[f"{name}_min"] = masked_min(values.detach(), inputs.mask)
    for term in outputs.regularizers:
        metrics[term.name] = masked_mean(term.values.detach(), inputs.mask)
    return loss, metrics
