"""A few chosen ids of every row: those that sampling kept, given ones, and the likeliest.

A token that was sampled with top-k or top-p came from the distribution over its kept ids S alone,
`p(t) = exp(x_t / T) / sum over s in S of exp(x_s / T)`. Its log-prob and gradient touch the columns
in S and no others, so time and memory grow with the kept ids and no `[T, V]` mask exists. One
implementation serves every device and every LM head: the row kernels do the dense part, if any.
The kept ids of a matrix of logits are a `Ragged` with one entry per row: the ids of the row, each
once. An empty entry keeps the whole vocabulary.

The log-probs of given ids are of the row's whole distribution, or of that over its kept ids, so
they cost a gather: the row's maximum and log-sum-exp are known from its token. In the backward pass
a row kernel writes what every column gets, `-p_j G` with G the sum of all incoming gradients of the
row. The columns of the ids are then overwritten: adding a small difference to a value that was
already rounded to the model's type would lose it.
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

    def arriving(self, given: GivenIds, grad_ids: Tensor, width: int) -> Tensor:
        """[K] float32: what of the gradients [T, k] of given ids arrives at each kept id.

        width: of this rank's columns; an id that its row does not keep gets nothing
        """
        found = grad_ids.new_zeros(self.rows.numel(), dtype=torch.float32)
        if not found.numel():
            return found
        own = torch.where(self.held, self.rows * width + self.columns, -1)
        order = own.argsort()
        row = torch.arange(len(grad_ids), device=own.device)[:, None]
        sought = row * width + given.columns[:, 1:]
        place = torch.searchsorted(own[order], sought).clamp(max=own.numel() - 1)
        entry = order[place]
        same = given.held[:, 1:] & (own[entry] == sought)
        values = torch.where(same, grad_ids.float(), 0.0)
        return found.index_add_(0, entry.flatten(), values.flatten())


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
        of_ids: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """[K] float32: the gradient of the kept logits; 0 where another rank holds the id.

        of_ids: what arrives at the kept ids [K] as given ones, and in all at the rows [T]

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
        if of_ids is not None:
            own, all_of_row = of_ids[0] * scale, of_ids[1][at.rows] * scale
            total += own - probability * all_of_row
            busy |= (own != 0) | (all_of_row != 0)
        if grad_entropy is not None and rows.entropy is not None:
            arriving = grad_entropy.float()[at.rows] * scale
            log_prob = exponent - sum_exp.log()
            total -= probability * (log_prob + rows.entropy[at.rows]) * arriving
            busy |= arriving != 0
        return torch.where(at.held & busy, total, 0.0)


class GivenIds(NamedTuple):
    """The token and the k ids of T rows, in this order, among this rank's columns.

    columns: [T, 1 + k] int64, anything where another rank holds the id; held: [T, 1 + k] bool
    is_token: [T, k] bool, an id that is its row's token
    """

    columns: Tensor
    held: Tensor
    is_token: Tensor

    @classmethod
    def located(
        cls, ids: Tensor, tokens: Tensor, columns: int, *, group: dist.ProcessGroup | None
    ) -> GivenIds:
        """Find ids [T, k], different ones in each row, in this rank's columns."""
        if ids.dim() != 2 or ids.shape[0] != tokens.numel():
            raise BatchError(
                f"given ids are {list(ids.shape)} for {tokens.numel()} tokens; give [T, k], k ids "
                "for each token"
            )
        ids = ids.to(device=tokens.device, dtype=torch.int64)
        first = columns * dist.get_rank(group) if group_size(group) > 1 else 0
        everything = torch.cat([tokens[:, None], ids], dim=1) - first
        held = (everything >= 0) & (everything < columns)
        return cls(everything, held, ids == tokens[:, None])

    def inside(self, rows: slice, column: int, column_end: int) -> tuple[Tensor, Tensor]:
        """[n, 1 + k] of some rows: whether a range of columns holds an id, and where in it."""
        columns, held = self.columns[rows], self.held[rows]
        held = held & (columns >= column) & (columns < column_end)
        return held, torch.where(held, columns - column, 0)

    def log_probs(
        self,
        logits: Tensor,
        rows: RowNormalizer,
        scale: float,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        """[T, k] float32 of logits [T, 1 + k], of which this rank knows those that it holds."""
        exponent = (logits[:, 1:].double() - rows.maximum[:, None]) * scale
        exponent = torch.where(self.held[:, 1:], exponent, 0.0)
        if group_size(group) > 1 and exponent.numel():
            dist.all_reduce(exponent, group=group)
        return (exponent - rows.sum_exp.double().log()[:, None]).float()


class IdGradients(NamedTuple):
    """What the columns of token and ids get in the backward pass.

    of_column: [T, 1 + k] all that arrives at the id's column; counted: the same, where an id is
        the token only once
    total: [T] G, the sum of what arrives; busy: [T] bool, whether it is not 0
    """

    at: GivenIds
    of_column: Tensor
    counted: Tensor
    total: Tensor
    busy: Tensor

    @classmethod
    def of(
        cls,
        at: GivenIds,
        grad_log_probs: Tensor | None,
        grad_ids: Tensor,
        grad_entropy: Tensor | None,
    ) -> IdGradients:
        """Join the gradients of the log-probs of tokens [T] and ids [T, k], and of the entropy."""
        of_ids = grad_ids.float()
        of_token = of_ids.new_zeros(of_ids.shape[0])
        if grad_log_probs is not None:
            of_token = grad_log_probs.float()
        both = torch.where(at.is_token, of_ids, 0.0).sum(1)
        shared = of_ids + torch.where(at.is_token, of_token[:, None], 0.0)
        once = of_token.masked_fill(at.is_token.any(1), 0.0)
        busy = (of_token != 0) | (of_ids != 0).any(1)
        if grad_entropy is not None:
            busy |= grad_entropy != 0
        return cls(
            at,
            torch.cat([(of_token + both)[:, None], shared], dim=1),
            torch.cat([once[:, None], shared], dim=1),
            of_token + of_ids.sum(1),
            busy,
        )

    def write(
        self,
        out: Tensor,
        logits: Tensor,
        held: Tensor,
        columns: Tensor,
        span: slice,
        rows: RowNormalizer,
        grad_entropy: Tensor | None,
        scale: float,
    ) -> None:
        """Write the columns of the ids into `out` [n, width], the gradient of a block of logits.

        logits: [n, 1 + k] float32, those at `columns`, read before `out` was written
        held, columns: of `GivenIds.inside`; rows, grad_entropy: [n], of the rows at `span`
        """
        # An id that the block does not hold writes the first column, with that column's gradient:
        # reading which ids are held would wait for the device.
        at_first = torch.where(held & (columns == 0), self.counted[span], 0.0).sum(1, keepdim=True)
        arriving = torch.where(held, self.of_column[span], at_first)
        exponent = ((logits - rows.maximum[:, None]) * scale).clamp_(min=LOWEST_EXPONENT)
        probability = exponent.exp() / rows.sum_exp[:, None]
        values = (arriving - probability * self.total[span, None]) * scale
        if grad_entropy is not None and rows.entropy is not None:
            log_prob = exponent - rows.sum_exp.log()[:, None]
            slope = probability * (log_prob + rows.entropy[:, None])
            values = values - slope * grad_entropy.float()[:, None] * scale
        values = torch.where(self.busy[span, None], values, 0.0)
        # Not scatter_: on CPU it copies all of a bfloat16 `out` first.
        row = torch.arange(len(out), device=out.device)[:, None].expand_as(columns)
        out.index_put_((row, columns), values.to(out.dtype))


def top_ids(
    logits: Tensor,
    k: int,
    *,
    group: dist.ProcessGroup | None = None,
    tokens_held: int | None = None,
) -> Tensor:
    """[T, k] int64: the ids with the largest of all logits of a row; k is at most the vocabulary.

    logits: `[T, V/tp]`, this rank's columns
    tokens_held: how many of this rank's columns count, the first ones; None = all
    """
    held = logits[:, :tokens_held].float()
    largest = held.topk(min(k, held.shape[1]), dim=1)
    return _over_shards(largest.values, largest.indices, logits.shape[1], k, group)


def fused_top_ids(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    group: dist.ProcessGroup | None = None,
    tokens_held: int | None = None,
    block_bytes: int = 256 << 20,
) -> Tensor:
    """`top_ids(hidden @ weight.T, k)`, of which a block of rows exists at a time.

    tokens_held: how many of this rank's rows of `weight` count, the first ones; None = all
    """
    rows = max(1, block_bytes // (weight.shape[0] * hidden.element_size()))
    held = weight[:tokens_held]
    blocks = [
        (block @ held.t()).float().topk(min(k, held.shape[0]), dim=1)
        for block in hidden.split(rows)
    ]
    logits, ids = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return _over_shards(logits, ids, weight.shape[0], k, group)


def _over_shards(
    logits: Tensor, columns: Tensor, shard_columns: int, k: int, group: dist.ProcessGroup | None
) -> Tensor:
    """The ids of the k largest logits of all shards together, on every rank; a collective."""
    size = group_size(group)
    if size == 1 or not len(columns):
        return columns
    # Shards may hold fewer than k tokens, and different numbers of them.
    rows, found = columns.shape
    ids, values = columns.new_full((rows, k), -1), logits.new_full((rows, k), -torch.inf)
    ids[:, :found], values[:, :found] = columns + shard_columns * dist.get_rank(group), logits
    all_ids = [torch.empty_like(ids) for _ in range(size)]
    all_values = [torch.empty_like(values) for _ in range(size)]
    dist.all_gather(all_ids, ids, group=group)
    dist.all_gather(all_values, values, group=group)
    largest = torch.cat(all_values, dim=1).topk(k, dim=1)
    return torch.cat(all_ids, dim=1).gather(1, largest.indices)
