"""What one pass over a block of logits leaves behind, and what a second pass needs.

With `z = (logits - maximum) * scale` over the columns of one vocabulary shard, a row is summarized
by four numbers. Shards combine by rescaling to a common maximum, so that the logits are read only
once before the collectives (see `vocab_shards.combine_shards`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

# `exp` of anything below is exactly 0 in float32, and `0 * LOWEST_EXPONENT` is 0 where `0 * -inf`
# is NaN.
LOWEST_EXPONENT = -1.0e4


class ShardStatistics(NamedTuple):
    """Per-row sums over the columns of one vocabulary shard; every field is `[T]` float32.

    Example: logits `[[0, log 3]]`, target column 0, scale 1: `maximum = log 3`,
    `sum_exp = 1/3 + 1`, `weighted_sum = 1/3 * log(1/3) + 0`, `target_logit = 0`.
    """

    maximum: torch.Tensor  # largest logit, unscaled; -inf where there is nothing else
    sum_exp: torch.Tensor  # sum of exp(z); 0, like weighted_sum, when the maximum is -inf
    weighted_sum: torch.Tensor | None  # sum of exp(z) * z; None when no entropy is asked for
    target_logit: torch.Tensor  # the target's logit, unscaled; 0 where `targets` is -1

    @classmethod
    def concatenated(cls, parts: Sequence[ShardStatistics]) -> ShardStatistics:
        """The rows of several, one after the other."""
        maximum, sum_exp, weighted_sum, target_logit = zip(*parts, strict=True)
        weighted = None if weighted_sum[0] is None else torch.cat(weighted_sum)
        return cls(torch.cat(maximum), torch.cat(sum_exp), weighted, torch.cat(target_logit))


class RowNormalizer(NamedTuple):
    """What makes a probability `exp((logit - maximum) * scale) / sum_exp`; `[T]` float32.

    Kept as two numbers: the log-sum-exp that joins them would lose low bits of both.
    """

    maximum: torch.Tensor
    sum_exp: torch.Tensor
    entropy: torch.Tensor | None  # needed only for the gradient of the entropy

    def select(self, rows: slice) -> RowNormalizer:
        """Those of some rows."""
        entropy = None if self.entropy is None else self.entropy[rows]
        return RowNormalizer(self.maximum[rows], self.sum_exp[rows], entropy)

    def where(self, rows: torch.Tensor, other: RowNormalizer) -> RowNormalizer:
        """These numbers of `rows` (bool `[T]`) and those of `other` elsewhere, without entropy."""
        maximum = torch.where(rows, self.maximum, other.maximum)
        return RowNormalizer(maximum, torch.where(rows, self.sum_exp, other.sum_exp), None)


class RowKernels(Protocol):
    """One implementation of the two passes over row-contiguous logits `[T, V/tp]`.

    `targets` is `[T]` int64: a column of this shard, or -1 where the shard holds none. A logit of
    -inf has probability 0.
    """

    name: str

    def forward_blocks(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        scale: float,
        with_entropy: bool,
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
        out: torch.Tensor,
    ) -> None:
        """Write the gradient of the logits into `out`, which may be the logits themselves.

        A row whose incoming gradients are all exactly 0 becomes exactly 0, whatever its logits
        hold.
        """
        ...
