"""Tokens to try a loss or a correction on, before the first microbatch."""

from __future__ import annotations

import torch

from plugin.loss.interfaces import LossInputs
from plugin.ppo_utils.masked_ops import zero_masked
from plugin.sharding.parallel_context import SINGLE_PROCESS
from plugin.sharding.sequence_shards import SequenceShards


def example_inputs() -> LossInputs:
    """Return two samples with responses of 2 and 3 tokens, one token masked.

    `cur_log_probs` is a leaf with gradient.
    """
    generator = torch.Generator().manual_seed(0)
    lengths, totals = [2, 3], [3, 5]
    loss_masks = [torch.tensor([1, 1]), torch.tensor([1, 0, 1])]
    mask = torch.cat(loss_masks) != 0

    def log_probs() -> torch.Tensor:
        return zero_masked(-1 - torch.rand(5, generator=generator), mask)

    return LossInputs(
        mask=mask,
        shards=SequenceShards.of(totals, lengths, torch.device("cpu"), SINGLE_PROCESS),
        cur_log_probs=log_probs().requires_grad_(),
        train_log_probs=log_probs(),
        advantages=zero_masked(torch.tensor([1.0, -0.5, 0.75, 0.0, -1.25]), mask),
        loss_masks=loss_masks,
        total_lengths=totals,
        rollout_log_probs=log_probs(),
        ref_log_probs=log_probs(),
        teacher_log_probs=log_probs(),
        entropy=zero_masked(torch.rand(5, generator=generator), mask),
    )
