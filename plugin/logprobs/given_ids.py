"""The ids with the largest logits of every row, and log-probs of given ids beside its token.

The log-probs of given ids are of the row's whole distribution, so they cost a gather: the row's
maximum and log-sum-exp are known from its token. In the backward pass a row kernel writes what
every column gets, `-p_j G` with G the sum of all incoming gradients of the row, and the columns of
the ids are then written as a whole, because adding to a value that was rounded to the model's type
would leave nothing of a small difference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from plugin.errors import BatchError
from plugin.logprobs.kernels import RowNormalizer
from plugin.logprobs.kernels.row_statistics import LOWEST_EXPONENT
from plugin.logprobs.vocab_shards import group_size


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
        out.scatter_(1, columns, values.to(out.dtype))


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
