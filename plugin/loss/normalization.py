"""Which denominator, over which tokens.

Every loss here is a weighted sum over the tokens of the whole global batch,

    loss = sum_t w_t l_t / W,

    reduction     w_t                                        W, of what carries loss
    token-mean    1                                          tokens
    sample-mean   1 / tokens of the sample                   samples
    fixed-length  1 / a constant                             samples
    prompt-mean   1 / tokens of all samples of the prompt    prompts
    group-mean    1 / (tokens of the sample x samples        prompts
                  of the group that carry loss)

The weights depend on the original masks alone, so that W, which is sum_t w_t except for
fixed-length, is known before the step and does not depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from plugin.ragged import Ragged
from plugin.sharding.sequence_shards import SequenceShards

Reducer = Callable[[Tensor], Tensor]


def sample_denominators(
    loss_masks: Sequence[Tensor], mask_sums: Sequence[float] | Tensor | None = None
) -> Tensor:
    """[N] float32: the token count that each sample is divided by, at least 1.

    `mask_sums` overrides a sample's own count, for instance by that of all samples of its prompt.
    """
    if mask_sums is not None:
        counts = torch.as_tensor(mask_sums, dtype=torch.float32)
    else:
        masks = Ragged.of(loss_masks)
        carries = (masks.values != 0).float()
        samples = torch.from_numpy(masks.sample_index).to(carries.device, non_blocking=True)
        counts = carries.new_zeros(len(masks)).index_add_(0, samples, carries)
    return counts.clamp(min=1)


def token_weights(
    shards: SequenceShards,
    mask: Tensor,
    loss_masks: Sequence[Tensor],
    *,
    per_token: bool,
    mask_sums: Sequence[float] | Tensor | None = None,
) -> Tensor:
    """w_t [T], 0 where masked."""
    if per_token:
        return mask.float()
    denominators = sample_denominators(loss_masks, mask_sums).to(shards.device)
    return torch.where(mask, 1.0 / shards.per_token(denominators), 0.0)


def weighted_sum(weights: Tensor) -> Reducer:
    """The reducer sum_t w_t x_t; a token of weight 0 is not computed with."""

    def reduce(values: Tensor) -> Tensor:
        return (torch.where(weights > 0, values, 0.0) * weights).sum()

    return reduce


def kept_token_scale(kept: Tensor, mask: Tensor, shards: SequenceShards) -> Tensor:
    """[T]: turns a mean over a sample's original tokens into a mean over its kept ones."""
    kept_count, count = shards.sequence_sums(kept, mask)
    return shards.per_token(count / kept_count.clamp(min=1))
