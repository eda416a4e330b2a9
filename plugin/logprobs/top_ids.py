"""The ids with the largest logits of every row, over vocabulary shards, from logits or without."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from plugin.logprobs.vocab_shards import group_size


class TopIds(NamedTuple):
    """The largest logits of every row, in falling order: ids [T, n] int64 and logits [T, n]."""

    ids: Tensor
    logits: Tensor

    @classmethod
    def of(cls, logits: Tensor, k: int, first: int = 0) -> TopIds:
        """Those of a block [T, width] whose first column is the id `first`; n = k at most."""
        largest = logits.float().topk(min(k, logits.shape[1]), dim=1)
        return cls(largest.indices + first, largest.values)

    def joined(self, *others: TopIds, k: int) -> TopIds:
        """The k largest of several."""
        ids = torch.cat([self.ids, *(other.ids for other in others)], dim=1)
        logits = torch.cat([self.logits, *(other.logits for other in others)], dim=1)
        largest = logits.topk(min(k, logits.shape[1]), dim=1)
        return TopIds(ids.gather(1, largest.indices), largest.values)


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
    first = logits.shape[1] * dist.get_rank(group) if group_size(group) > 1 else 0
    return _over_shards(TopIds.of(logits[:, :tokens_held], k, first), k, group)


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
    first = weight.shape[0] * dist.get_rank(group) if group_size(group) > 1 else 0
    held = weight[:tokens_held]
    parts = [TopIds.of(block @ held.t(), k, first) for block in hidden.split(rows)]
    if not parts:
        return torch.zeros(0, k, dtype=torch.int64, device=hidden.device)
    own = TopIds(*(torch.cat(list(values)) for values in zip(*parts, strict=True)))
    return _over_shards(own, k, group)


def _over_shards(own: TopIds, k: int, group: dist.ProcessGroup | None) -> Tensor:
    """Those of all shards together, on every rank; a collective."""
    size = group_size(group)
    if size == 1 or not own.ids.shape[0]:
        return own.ids
    # Shards may hold fewer than k tokens, and different numbers of them.
    rows, found = own.ids.shape
    ids = own.ids.new_full((rows, k), -1)
    logits = own.logits.new_full((rows, k), -torch.inf)
    ids[:, :found], logits[:, :found] = own.ids, own.logits
    all_ids = [torch.empty_like(ids) for _ in range(size)]
    all_logits = [torch.empty_like(logits) for _ in range(size)]
    dist.all_gather(all_ids, ids, group=group)
    dist.all_gather(all_logits, logits, group=group)
    shards = [TopIds(*pair) for pair in zip(all_ids, all_logits, strict=True)]
    return shards[0].joined(*shards[1:], k=k).ids
