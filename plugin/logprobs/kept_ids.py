"""Log-probs over the ids that truncated sampling kept: a few columns of every row.

A token that was sampled with top-k or top-p came from the distribution over its kept ids S alone,
`p(t) = exp(x_t / T) / sum over s in S of exp(x_s / T)`. Its log-prob and gradient touch the columns
in S and no others, so time and memory grow with the kept ids and no `[T, V]` mask exists. One
implementation serves every device and every LM head: the row kernels do the dense part, if any.

The kept ids of a matrix of logits are a `Ragged` with one entry per row: the ids of the row, each
once. An empty entry keeps the whole vocabulary.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from plugin.errors import BatchError
from plugin.logprobs.kernels import RowNormalizer, ShardStatistics
from plugin.logprobs.kernels.row_statistics import LOWEST_EXPONENT
from plugin.logprobs.vocab_shards import group_size
from plugin.ragged import Ragged

EntropyOf = Literal["full", "kept"]
#: Size of the float32 factors in memory at a time.
_PRODUCT_BYTES = 32 << 20


class KeptColumns(NamedTuple):
    """Where the K kept ids of T rows are among this rank's columns.

    rows, columns: [K] int64; the column is 0 where another rank holds the id
    held: [K] bool, this rank holds the id; is_target: [K] bool, and it is its row's token
    truncated: [T] bool, rows with kept ids; absent: [T] bool, rows whose token is not among them
    everywhere: whether all rows are truncated, known on the host
    """

    rows: Tensor
    columns: Tensor
    held: Tensor
    is_target: Tensor
    truncated: Tensor
    absent: Tensor
    everywhere: bool

    def inside(
        self, row: int, column: int, height: int, width: int
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """[K] bool: which ids a block holds; and where in it, or somewhere if it does not."""
        rows, columns = self.rows - row, self.columns - column
        inside = self.held & (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
        return inside, (torch.where(inside, rows, 0), torch.where(inside, columns, 0))


def locate_kept(
    kept: Ragged, tokens: Tensor, columns: int, *, group: dist.ProcessGroup | None
) -> KeptColumns:
    """Find the kept ids of every row, whose token is in `tokens` [T], in this rank's columns."""
    if len(kept) != tokens.numel():
        raise BatchError(
            f"kept ids of {len(kept)} rows for {tokens.numel()} tokens; give one entry per row, "
            "empty where the row keeps the whole vocabulary"
        )
    device = tokens.device
    ids = kept.values.to(device=device, dtype=torch.int64, non_blocking=True)
    rows = torch.from_numpy(kept.sample_index).to(device, non_blocking=True)
    truncated = torch.from_numpy(kept.lengths > 0).to(device, non_blocking=True)
    first = columns * dist.get_rank(group) if group_size(group) > 1 else 0
    held = (ids >= first) & (ids < first + columns)
    # Every rank has all ids, so all know whether a token is among its kept ones.
    is_target = ids == tokens[rows]
    found = torch.zeros_like(tokens).index_add_(0, rows, is_target.long())
    return KeptColumns(
        rows,
        torch.where(held, ids - first, 0),
        held,
        is_target & held,
        truncated,
        found == 0,
        bool((kept.lengths > 0).all()),
    )


class KeptLogits(NamedTuple):
    """The logits of the kept ids: [K] float32, unscaled, -inf where another rank holds the id."""

    values: Tensor
    at: KeptColumns

    @classmethod
    def of(cls, logits: Tensor, at: KeptColumns) -> KeptLogits:
        """Gather them from `[T, V/tp]` logits."""
        values = logits[at.rows, at.columns].float()
        return cls(values.masked_fill(~at.held, -torch.inf), at)

    @classmethod
    def of_products(cls, hidden: Tensor, weight: Tensor, at: KeptColumns) -> KeptLogits:
        """Those of `hidden @ weight.t()`: K products of two vectors in place of T times V/tp."""
        values = hidden.new_empty(at.rows.numel())
        count = max(1, _PRODUCT_BYTES // (8 * hidden.shape[1]))
        for start in range(0, at.rows.numel(), count):
            block = slice(start, start + count)
            left, right = hidden[at.rows[block]], weight[at.columns[block]]
            # Rounded to the model's type like the logits of a matrix product.
            values[block] = torch.linalg.vecdot(left.float(), right.float()).to(values.dtype)
        return cls(values.float().masked_fill(~at.held, -torch.inf), at)

    def statistics(self, scale: float, with_entropy: bool) -> ShardStatistics:
        """Summarize every row over its kept ids; rows without any have a maximum of -inf."""
        rows, count = self.at.rows, self.at.truncated.numel()
        maximum = self.values.new_full((count,), -torch.inf)
        maximum.scatter_reduce_(0, rows, self.values, "amax")
        base = maximum.masked_fill(maximum == -torch.inf, 0.0)[rows]
        exponent = ((self.values - base) * scale).clamp_(min=LOWEST_EXPONENT)
        weight = exponent.exp()
        targets = torch.where(self.at.is_target, self.values, 0.0)
        weighted_sum = self._sum(weight * exponent) if with_entropy else None
        return ShardStatistics(maximum, self._sum(weight), weighted_sum, self._sum(targets))

    def _sum(self, terms: Tensor) -> Tensor:
        """[T] float32 per row; in float64 the order in which a device adds leaves no trace."""
        zeros = terms.new_zeros(self.at.truncated.numel(), dtype=torch.float64)
        return zeros.index_add_(0, self.at.rows, terms.double()).float()

    def gradient(
        self,
        rows: RowNormalizer,
        grad_log_probs: Tensor | None,
        grad_entropy: Tensor | None,
        scale: float,
    ) -> Tensor:
        """[K] float32: the gradient of the kept logits; 0 where another rank holds the id.

        As in the row kernels, a row whose incoming gradients are exactly 0 gets exactly 0.
        """
        at = self.at
        exponent = ((self.values - rows.maximum[at.rows]) * scale).clamp_(min=LOWEST_EXPONENT)
        sum_exp = rows.sum_exp[at.rows]
        probability = exponent.exp() / sum_exp
        total, busy = torch.zeros_like(probability), torch.zeros_like(at.held)
        if grad_log_probs is not None:
            arriving = grad_log_probs.float()[at.rows] * scale
            total += torch.where(at.is_target, arriving, 0.0) - probability * arriving
            busy |= arriving != 0
        if grad_entropy is not None and rows.entropy is not None:
            arriving = grad_entropy.float()[at.rows] * scale
            log_prob = exponent - sum_exp.log()
            total -= probability * (log_prob + rows.entropy[at.rows]) * arriving
            busy |= arriving != 0
        return torch.where(at.held & busy, total, 0.0)
