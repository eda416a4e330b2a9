"""Undo what Megatron's schedule and DDP multiply into the loss; only this file knows.

Wanted: the gradient of one global mean, sum_t w_t l_t / sum_t w_t over every token of every rank.
Megatron-Core offers two conventions, chosen by `TransformerConfig.calculate_per_token_loss`:

- per token: the schedule leaves the loss alone, DDP sums gradients over DP x CP ranks, and
  `finalize_model_grads` divides by the sum of the token counts that the loss closures returned. So
  a closure returns its plain sum and its local count.
- per sample: the schedule divides by the returned count (1 here) and by the number of microbatches,
  and DDP divides by the DP x CP size. So a closure multiplies both back in and divides by the
  global sum of weights, which is known before the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plugin.batch_types import RolloutBatch
from plugin.config import LossConfig
from plugin.errors import BatchError
from plugin.ragged import Stored


@dataclass(frozen=True)
class LossScale:
    """The factors of one step.

    total_weight: what the sum of w_t l_t over the global batch is divided by
    loss_scale: what the schedule multiplies the loss by in float16, and the optimizer divides by
    """

    per_token: bool
    total_weight: float
    num_microbatches: int
    dp_cp_size: int
    loss_scale: float = 1.0

    @property
    def gradient_of_weighted_sum(self) -> float:
        """The gradient that Megatron's schedule gives to the sum that `for_megatron` received."""
        mean = 1.0 if self.per_token else self.dp_cp_size / max(self.total_weight, 1e-12)
        return self.loss_scale * mean

    def for_megatron(self, weighted_sum: Tensor, local_count: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, num_tokens) as a loss closure returns them.

        weighted_sum: sum of w_t l_t over this microbatch's local tokens
        local_count: its local tokens that are in the denominator (used per token only)
        """
        if self.per_token:
            return weighted_sum, local_count.to(torch.int)
        factor = self.num_microbatches * self.dp_cp_size / max(self.total_weight, 1e-12)
        return weighted_sum * factor, torch.ones((), dtype=torch.int, device=weighted_sum.device)


def weigh_samples(batch: RolloutBatch, config: LossConfig) -> tuple[RolloutBatch, float]:
    """The whole batch with the divisor of every sample, and the reduction's `total_weight`.

    Divisors over prompts need all of their samples, so they are found before the batch is cut and
    travel as `rollout_mask_sums`.
    """
    reduction = config.reduction
    if reduction in ("token-mean", "sample-mean"):
        return batch, total_weight(batch, per_token=config.per_token)
    if "rollout_mask_sums" in batch:
        raise BatchError(
            f"the batch has rollout_mask_sums and --loss-reduction is {reduction}: both divide the "
            "samples; drop the column, or use sample-mean"
        )
    counts = loss_token_counts(batch)
    if reduction == "fixed-length":
        assert config.fixed_length is not None
        divisors = np.full(len(batch), float(config.fixed_length))
        return batch.with_column("rollout_mask_sums", divisors), float((counts > 0).sum())
    if "group_index" not in batch:
        raise BatchError(
            f"--loss-reduction {reduction} needs group_index, the prompt of every sample, and the "
            "batch has none; add it, or use sample-mean"
        )
    _, group = np.unique(batch.columns["group_index"].numpy(force=True), return_inverse=True)
    if reduction == "prompt-mean":
        divisors = np.bincount(group, weights=counts)[group]
    else:
        divisors = counts * np.bincount(group, weights=counts > 0)[group]
    batch = batch.with_column("rollout_mask_sums", np.maximum(divisors, 1.0))
    return batch, total_weight(batch, per_token=False)


def loss_token_counts(batch: RolloutBatch) -> NDArray[np.float64]:
    """[N] how many tokens of each sample carry loss."""
    masks = batch.columns["loss_masks"]
    if isinstance(masks, Stored):
        return batch.columns["loss_token_counts"].numpy(force=True).astype(np.float64)
    return masks.like(masks.values != 0).reduced(np.add, 0).astype(np.float64)


def total_weight(batch: RolloutBatch, *, per_token: bool) -> float:
    """Sum of w_t over the whole batch: tokens that carry loss, or samples that carry loss."""
    counts = loss_token_counts(batch)
    if per_token:
        return float(counts.sum())
    divisors = batch.columns.get("rollout_mask_sums")
    divided_by = counts if divisors is None else divisors.numpy(force=True).astype(np.float64)
    return float((counts / np.maximum(divided_by, 1.0)).sum())
