"""What one pass over a block of logits leaves behind, and what a second pass needs.

With `z = (logits - maximum) * scale` over the columns of one vocabulary shard, a row is summarized
by four numbers. Shards combine by rescaling to a common maximum, so that the logits are read only
once before the collectives (see `vocab_parallel_logprobs.combine_shards`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

# `exp` of anything below is exactly 0 in float32, and `0 * LOWEST_EXPONENT` is 0 where `0 * -inf`
# is NaN.
LOWEST_EXPONENT = -1.0e4


class ShardStatistics(NamedTuple):
    """Per-row sums over the columns of one vocabulary shard; every field is `[T]` float32.

    Example: logits `[[0, log 3]]`, target column 0, scale 1: `maximum = log 3`,
        `sum_exp = 1/3 + 1`,
    `weighted_sum = 1/3 * log(1/3) + 0`, `target_logit = 0`.
    """

    maximum: torch.Tensor  # largest kept logit, unscaled; -inf when the shard keeps no column
    sum_exp: torch.Tensor  # sum of exp(z); 0, like weighted_sum, when the maximum is -inf
    weighted_sum: torch.Tensor | None  # sum of exp(z) * z; None when no entropy is asked for
    target_logit: torch.Tensor  # the target's logit, unscaled; 0 where `targets` is -1


class RowNormalizer(NamedTuple):
    """What makes a probability `exp((logit - maximum) * scale) / sum_exp`; `[T]` float32.

    Kept as two numbers: the log-sum-exp that joins them would lose low bits of both.
    """

    maximum: torch.Tensor
    sum_exp: torch.Tensor
    entropy: torch.Tensor | None  # needed only for the gradient of the entropy


class RowKernels(Protocol):
    """One implementation of the two passes over row-contiguous logits `[T, V/tp]`.

    `targets` is `[T]` int64: a kept column of this shard, or -1 where the shard holds none.
    `keep_mask` is a bool tensor shaped like the logits, or None; a column that is not kept has
    probability 0.
    """

    name: str

    def forward_blocks(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        scale: float,
        with_entropy: bool,
        keep_mask: torch.Tensor | None = None,
    ) -> ShardStatistics:
        """Summarize every row in one pass over the logits."""
        ...

    def backward_blocks(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        rows: RowNormalizer,
        grad_log_probs: torch.Tensor | None,
        grad_entropy: torch.Tensor | None,
        *,
        scale: float,
        keep_mask: torch.Tensor | None = None,
        out: torch.Tensor,
    ) -> None:
        """Write the gradient of the logits into `out`, which may be the logits themselves.

        A row whose incoming gradients are all exactly 0 becomes exactly 0, whatever its logits
        hold.
        """
        ...
