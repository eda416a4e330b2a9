"""Packed rows on the local layers: whose each token is, and attention that costs S^2 per sample.

Samples of similar length are padded on the right to one batch of causal attention. That needs no
mask: a token never sees what comes after it, and what padding computes is dropped. Where keys and
queries differ in number (windows, context parallelism) or a sink is added, each sample is attended
to in blocks of queries, whose masks are small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from plugin.errors import BatchError
from plugin.ragged import Integers, ragged_range
from plugin.sharding.zigzag import chunk_starts, local_positions

Kernel = Callable[..., Tensor]
"""Like `F.scaled_dot_product_attention`, with scale and dropout bound."""

TAIL_PADDING = -1
"""Sample id of tokens that fill a row up to its budget and belong to no sample."""

QUERY_BLOCK = 512
"""Queries that are attended from at once where a mask is needed."""


@dataclass(kw_only=True)
class PackedLayout(PackedSeqParams):
    """Which sample and which position every token of a row belongs to.

    Two samples of 3 and 2 tokens, one token of tail padding, no context parallelism:
    `positions [0 1 2 0 1 0]`, `sample_ids [0 0 0 1 1 -1]`. A token attends to the tokens of its own
    sample at its own or an earlier position; tail padding is a sample of its own.

    positions, sample_ids: [S_local] int64, of the tokens of this context parallel rank
    lengths: [N] padded lengths of all samples, of all CP ranks, and of the tail if there is one
    """

    qkv_format: str = "sbhd"
    positions: Tensor
    sample_ids: Tensor
    lengths: Integers
    cp_size: int = 1
    cp_rank: int = 0

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int] | Integers,
        *,
        row_length: int | None = None,
        cp_size: int = 1,
        cp_rank: int = 0,
        device: torch.device | str = "cpu",
    ) -> PackedLayout:
        """Lay samples of these padded lengths one after the other in a row of `row_length` tokens.

        `row_length` counts the tokens of all CP ranks; what the samples leave free is tail padding.
        """
        total = int(sum(lengths))
        row_length = total if row_length is None else row_length
        if row_length < total:
            raise BatchError(
                f"samples of {list(lengths)} tokens need {total} positions but the row has "
                f"{row_length}; raise the row length or pack fewer samples"
            )
        pieces = np.array([*lengths, row_length - total])
        ids = np.array([*range(len(lengths)), TAIL_PADDING])
        return cls(
            positions=torch.from_numpy(local_positions(pieces, cp_rank, cp_size)).to(device),
            sample_ids=torch.from_numpy(np.repeat(ids, pieces // cp_size)).to(device),
            lengths=pieces[pieces > 0],
            cp_size=cp_size,
            cp_rank=cp_rank,
        )

    def to(self, device: torch.device | str) -> PackedLayout:
        """The same layout with its tensors on `device`."""
        return PackedLayout(
            positions=self.positions.to(device, non_blocking=True),
            sample_ids=self.sample_ids.to(device, non_blocking=True),
            lengths=self.lengths,
            cp_size=self.cp_size,
            cp_rank=self.cp_rank,
        )

    @cached_property
    def batches(self) -> CausalBatches:
        """The samples in batches of similar length (without context parallelism)."""
        return CausalBatches.of(self.lengths, self.positions.device)

    @cached_property
    def key_order(self) -> Tensor:
        """[cp * S_local]: where the keys of all CP ranks, gathered rank after rank, have their
        place when each sample's stand one after the other by position."""
        starts = np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths // self.cp_size)
        places = [
            starts + local_positions(self.lengths, rank, self.cp_size)
            for rank in range(self.cp_size)
        ]
        order = np.argsort(np.concatenate(places))
        return torch.from_numpy(order).to(self.positions.device)

    def query_blocks(self) -> Iterator[tuple[int, int, int]]:
        """(sample, first position, length) of every block of queries, in the order of the row."""
        starts, chunks = chunk_starts(self.lengths, self.cp_rank, self.cp_size)
        for sample, chunk in enumerate(chunks.tolist()):
            for start in starts[sample].tolist():
                for first in range(0, chunk, QUERY_BLOCK):
                    yield sample, start + first, min(QUERY_BLOCK, chunk - first)


@dataclass(frozen=True)
class CausalBatches:
    """Samples of a row, sorted by length and padded on the right to batches.

    Samples of 2, 90 and 100 tokens: shapes ((2, 100), (1, 2)).

    shapes: (samples, padded length) of each batch
    place: [P] the token of the row at every place of the padded batches (0 where it is padding);
        None where the row already is the one batch
    padding: the places that are padding; where: [S] the place of every token of the row
    """

    shapes: tuple[tuple[int, int], ...]
    place: Tensor | None
    padding: Tensor | None
    where: Tensor | None

    @classmethod
    def of(cls, lengths: Integers, device: torch.device | str = "cpu") -> CausalBatches:
        """Batches of samples [N] of which none is padded by more than a quarter or 64 tokens."""
        if (lengths == lengths[0]).all():
            return cls(((len(lengths), int(lengths[0])),), None, None, None)
        order = np.argsort(-lengths, kind="stable")
        by_length = lengths[order]
        ends = [0]
        while ends[-1] < len(lengths):
            longest = by_length[ends[-1]]
            shortest = 1 if longest <= 64 else longest / 1.25
            ends.append(int(np.searchsorted(-by_length, -shortest, side="right")))
        shapes = tuple((end - begin, int(by_length[begin])) for begin, end in pairwise(ends))
        padded = np.concatenate([np.full(count, length) for count, length in shapes])
        row_starts = (np.cumsum(lengths) - lengths)[order]
        tokens = ragged_range(row_starts, by_length)
        places = ragged_range(np.cumsum(padded) - padded, by_length)
        place = np.full(padded.sum(), -1)
        place[places] = tokens
        padding = np.flatnonzero(place < 0)
        where = np.empty(len(tokens), dtype=np.int64)
        where[tokens] = places
        index = [
            torch.from_numpy(x).to(device, non_blocking=True)
            for x in (place.clip(min=0), padding, where)
        ]
        return cls(shapes, *index)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, kernel: Kernel) -> Tensor:
        """Causal attention of every sample: [S, n, d] each -> [S, n, d]."""
        sizes = [count * length for count, length in self.shapes]
        parts = zip(*(self._batched(x).split(sizes) for x in (query, key, value)), strict=True)
        contexts = []
        for (count, length), part in zip(self.shapes, parts, strict=True):
            q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in part)
            context = kernel(q, k, v, is_causal=True)
            contexts.append(context.transpose(1, 2).flatten(0, 1))
        context = contexts[0] if len(contexts) == 1 else torch.cat(contexts)
        return context if self.where is None else _FromBatches.apply(context, self)

    def _batched(self, x: Tensor) -> Tensor:
        return x if self.where is None else _ToBatches.apply(x, self)


def _to_batches(x: Tensor, batches: CausalBatches) -> Tensor:
    assert batches.place is not None and batches.padding is not None
    return x.index_select(0, batches.place).index_fill_(0, batches.padding, 0)


def _from_batches(x: Tensor, batches: CausalBatches) -> Tensor:
    assert batches.where is not None
    return x.index_select(0, batches.where)


class _ToBatches(torch.autograd.Function):
    """Tokens [S, ...] at their places in padded batches [P, ...]; padding is 0.

    Each function is the other's transpose. Autograd's own backward of an index adds row by row.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, batches: CausalBatches) -> Tensor:
        ctx.batches = batches
        return _to_batches(x, batches)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _from_batches(grads[0], ctx.batches), None


class _FromBatches(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, batches: CausalBatches) -> Tensor:
        ctx.batches = batches
        return _from_batches(x, batches)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _to_batches(grads[0], ctx.batches), None


def attend_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    kernel: Kernel,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of every sample from blocks of queries, [S, B, n, d] -> [S, B, n, d].

    key, value: [cp * S, B, groups, d], each sample's by position (`PackedLayout.key_order`)
    window: a token sees the last `window` tokens, itself included; sinks: [n]
    """
    blocks = list(layout.query_blocks())
    queries = query.split([count for _, _, count in blocks])
    keys, values = (x.split(layout.lengths.tolist()) for x in (key, value))
    contexts = []
    masks: dict[tuple[int, int, int], Tensor] = {}  # kept for the backward pass, so shared
    for (sample, first, count), part in zip(blocks, queries, strict=True):
        begin = 0 if window is None else max(0, first - window + 1)
        seen = slice(begin, first + count)
        # [S, B, n, d] -> [B, n, S, d]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (part, keys[sample][seen], values[sample][seen]))
        form = (count, k.shape[2], first - begin)
        if form not in masks:
            masks[form] = _mask_of_block(*form, window, q, is_added=sinks is None)
        contexts.append(masked_attention(q, k, v, masks[form], kernel, sinks).permute(2, 0, 1, 3))
    return torch.cat(contexts)


def _mask_of_block(
    count: int, keys: int, before: int, window: int | None, like: Tensor, *, is_added: bool
) -> Tensor:
    """[count, keys]: which keys the queries see, `before` keys before the first one's own.

    is_added: what is added to scores instead, in the type that they are computed in; a bool mask
        is converted anew, and kept, for every block
    """
    visible = torch.ones(count, keys, dtype=torch.bool, device=like.device).tril(before)
    if window is not None:
        visible = visible.triu(before - window + 1)
    if not is_added:
        return visible
    dtype = torch.float32 if like.device.type == "cpu" else like.dtype
    dtype = torch.float64 if like.dtype is torch.float64 else dtype
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, float("-inf"))


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, kernel: Kernel, sinks: Tensor | None
) -> Tensor:
    """Attention [B, n, S, d] to the keys that are visible: broadcastable to [B, 1, S, S_keys],
    bool, or without sinks also what is added to scores.

    A sink is a last key with a value of 0 and its own logit in the mask.
    """
    if sinks is None:
        return kernel(q, k, v, attn_mask=visible)
    k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    mask = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, float("-inf"))
    mask = mask.expand(*q.shape[:2], *visible.shape[-2:])
    column = sinks.to(q.dtype)[None, :, None, None].expand(*mask.shape[:-1], 1)
    return kernel(q, k, v, attn_mask=torch.cat([mask, column], dim=-1))
