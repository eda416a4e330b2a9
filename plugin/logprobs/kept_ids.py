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
from plugin.logprobs.vocab_shards import combine_shards, group_size
from plugin.ragged import Ragged

EntropyOf = Literal["full", "kept"]
#: Of float32 factors that are at hand at a time.
_PRODUCT_BYTES = 32 << 20


class KeptColumns(NamedTuple):
    """Where the K kept ids of T rows are among this rank's columns.

    rows, columns: [K] int64; the column is 0 where another rank holds the id
    held: [K] bool, this rank holds the id; is_target: [K] bool, and it is its row's token
    truncated: [T] bool, rows with kept ids; absent: [T] bool, rows whose token is not among them
    everywhere: whether all rows are truncated, known without asking the device
    """

    rows: Tensor
    columns: Tensor
    held: Tensor
    is_target: Tensor
    truncated: Tensor
    absent: Tensor
    everywhere: bool


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


class JoinedRows(NamedTuple):
    """Log-probs and entropy [T] of all shards together, and what their gradient needs.

    dense: of the whole vocabulary, None where no row needs it; kept: of the kept ids, None where
        there are none
    """

    log_probs: Tensor
    entropy: Tensor | None
    dense: RowNormalizer | None
    kept: RowNormalizer | None


def join_shards(
    dense: ShardStatistics | None,
    kept: KeptLogits | None,
    targets: Tensor,
    absent: Tensor,
    *,
    columns: int,
    scale: float,
    with_entropy: bool,
    entropy_of: EntropyOf,
    group: dist.ProcessGroup | None,
) -> JoinedRows:
    """Join the statistics of all shards; a row with kept ids has the log-prob over these.

    dense: over all columns, or None if `needs_dense` is not; targets, absent: of `locate_targets`
    Both kinds of statistics travel together: two collectives, as for one.
    """
    if kept is None:
        assert dense is not None
        log_probs, rows = combine_shards(
            dense, targets, absent, columns=columns, scale=scale, group=group
        )
        return JoinedRows(log_probs, rows.entropy, rows, None)
    at, count = kept.at, targets.numel()
    parts = [kept.statistics(scale, with_entropy)]
    places, missing = [torch.where(at.absent, -1, targets)], [at.absent]
    if dense is not None:
        parts, places, missing = [*parts, dense], [*places, targets], [*missing, absent]
    log_probs, rows = combine_shards(
        ShardStatistics(*(_stacked(values) for values in zip(*parts, strict=True))),  # type: ignore[arg-type]
        torch.cat(places),
        torch.cat(missing),
        columns=columns,
        scale=scale,
        group=group,
    )
    narrow = RowNormalizer(*(None if v is None else v[:count] for v in rows))  # type: ignore[arg-type]
    if dense is None:
        return JoinedRows(log_probs, narrow.entropy, None, narrow)
    wide = RowNormalizer(*(None if v is None else v[count:] for v in rows))  # type: ignore[arg-type]
    entropy = wide.entropy
    if narrow.entropy is not None and wide.entropy is not None and entropy_of == "kept":
        entropy = torch.where(at.truncated, narrow.entropy, wide.entropy)
    log_probs = torch.where(at.truncated, log_probs[:count], log_probs[count:])
    return JoinedRows(log_probs, entropy, wide, narrow)


def needs_dense(at: KeptColumns | None, with_entropy: bool, entropy_of: EntropyOf) -> bool:
    """Whether any row needs all columns: one without kept ids, or the full entropy."""
    return at is None or not at.everywhere or (with_entropy and entropy_of == "full")


def dense_gradients(
    at: KeptColumns | None,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    entropy_of: EntropyOf,
) -> tuple[Tensor | None, Tensor | None]:
    """The incoming gradients [T] of the part that all columns of a row take part in."""
    if at is None:
        return grad_log_probs, grad_entropy
    if grad_log_probs is not None:
        grad_log_probs = grad_log_probs.masked_fill(at.truncated, 0.0)
    if grad_entropy is not None and entropy_of == "kept":
        grad_entropy = grad_entropy.masked_fill(at.truncated, 0.0)
    return grad_log_probs, grad_entropy


def _stacked(values: tuple[Tensor | None, ...]) -> Tensor | None:
    present = [value for value in values if value is not None]
    return torch.cat(present) if present else None
