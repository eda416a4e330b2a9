"""The rows of a KV cache that decode together: rows join, read one token per step, and leave.

Contexts are read side by side in one row, without padding and without a mask: attention goes by
runs of contexts of equal length, and everything else in a model works token by token.

A padded cache makes every row as expensive as the longest one. Rows are kept in the order of their
length, so that rows of similar length form a block, which attends to its own positions only. Keys
that several query heads share are not repeated in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

#: Share of rows that have left at which they are removed from the cache, which copies it.
_SHARE_OF_EMPTY_ROWS = 1 / 8
#: Most tokens of one pass, unless a single context is longer: activations grow with them.
_READ_AT_ONCE = 8192
_ATTENTION = "megatron_tis_decode"
#: A block holds rows at least this long, as a share of its longest row.
_SHORTEST_OF_BLOCK = 0.6
_LAST = torch.tensor([-1])


class Block(NamedTuple):
    """Rows `begin` to `end`, which see no position before `start`."""

    begin: int
    end: int
    start: int


class Rows(NamedTuple):
    """Keys and values [n, heads, positions, D] of rows, and the place [n] of each in the cache."""

    keys: Tensor
    values: Tensor
    places: Tensor


class Run(NamedTuple):
    """Neighboring contexts of equal length."""

    contexts: int
    length: int


def blocks_of(lengths: Tensor, positions: int) -> list[Block]:
    """Blocks of rows of `lengths` [B], longest first, all of which end at `positions`.

    Example: lengths [90, 60, 9, 8] of 100 positions: rows 0 and 1 from 10 on, rows 2 and 3 from 91.
    """
    ascending = lengths.flip(0)
    blocks, end = [], len(lengths)
    begin = 0
    while begin < end:
        longest = int(lengths[begin])
        short = int(torch.searchsorted(ascending, longest * _SHORTEST_OF_BLOCK))
        blocks.append(Block(begin, end - short, positions - longest))
        begin = end - short
    return blocks


def masks_of(blocks: Sequence[Block], lengths: Tensor, like: Tensor) -> list[Tensor | None]:
    """Additive masks [rows, 1, 1, positions] of the blocks: -inf before a row begins, or None
    where all rows of a block are equally long.

    like: has the dtype and device of the masks
    """
    masks: list[Tensor | None] = []
    for begin, end, _ in blocks:
        longest = int(lengths[begin])
        before = torch.arange(longest) < longest - lengths[begin:end, None]
        mask = torch.zeros(before.shape).masked_fill_(before, -torch.inf)[:, None, None]
        masks.append(mask.to(like.device, like.dtype) if bool(before.any()) else None)
    return masks


def runs_of(lengths: Tensor) -> list[Run]:
    """Neighbors of equal length. Example: 7, 7 and 3 are a run of two and a run of one."""
    return [Run(len(list(equal)), length) for length, equal in groupby(lengths.tolist())]


Forward = Callable[..., Tensor]
"""(tokens [B, S], positions [B, S], cache, places [n], and what attention needs to know, see
`DecodeBatch`) -> logits [B, n, V] of these places."""


class DecodeBatch:
    """Rows of different lengths, longest first, all of which end at the cache's last position.

    forward: runs the model; attention gets `runs` where contexts are read and `blocks` with their
        `masks` where every row reads a token, or without `packs` an `attention_mask` [B, past + S]
    new_cache: makes an empty cache
    packs: whether every layer attends with `decode_attention` over a `GrowingLayer`. Otherwise
        contexts are padded on the left, and no rows join others: layers that forget positions
        cannot be aligned
    owners: [B] who each row belongs to, -1 where it has left
    """

    def __init__(self, forward: Forward, new_cache: Callable[[], Any], *, packs: bool) -> None:
        self._forward, self._new_cache, self._packs = forward, new_cache, packs
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self._cache: Any = None
        self.owners = torch.empty(0, dtype=torch.int64)
        self._mask = torch.empty(0, 0, dtype=torch.bool)
        self._lengths = torch.empty(0, dtype=torch.int64)

    @property
    def is_open(self) -> bool:
        """Whether rows can be added."""
        return self._packs or self._cache is None

    @property
    def rows(self) -> Tensor:
        """[n] the rows that have not left."""
        return (self.owners >= 0).nonzero().flatten()

    def join(
        self, contexts: Sequence[Sequence[int]], copies: Tensor, owners: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Read every context once and add `copies` [n] rows of each; rows that have left go.

        owners: [m] of the new rows, in the order of the contexts
        Returns logits [m, V], and the places of each context's tokens among all that were read.
        """
        lengths = torch.tensor([len(context) for context in contexts])
        sources = torch.arange(len(copies)).repeat_interleave(copies)
        old = self.rows
        of_rows = torch.cat([self._lengths[old], lengths[sources]])
        order = of_rows.argsort(descending=True, stable=True)
        if self._packs:
            # The places of the old rows, then those of the copies of each context.
            stay, *come = order.argsort().split([len(old), *copies.tolist()])
            logits, places, caches = self._read_packed(contexts, lengths)
            self._fill(old, stay, caches, come)
        else:
            logits, places = self._begin_padded(contexts, sources[order])
        self.owners = torch.cat([self.owners[old], owners])[order]
        self._lengths = of_rows[order]
        return logits[sources.to(logits.device)], places

    def _read_packed(
        self, contexts: Sequence[Sequence[int]], lengths: Tensor
    ) -> tuple[Tensor, list[Tensor], list[ReadContexts]]:
        """Logits [n, V] and places as `join` returns them, and the caches of all passes."""
        by_length = lengths.argsort(descending=True, stable=True)
        logits, caches = [], []
        for members in passes_of(by_length, lengths):
            read = ReadContexts(self._new_cache(), runs_of(lengths[members]), members)
            tokens = torch.tensor([token for i in members.tolist() for token in contexts[i]])
            positions = torch.cat([torch.arange(n) for n in lengths[members].tolist()])
            ends = lengths[members].cumsum(0) - 1
            logits.append(
                self._forward(tokens[None], positions[None], read.cache, ends, runs=read.runs)[0]
            )
            caches.append(read)
        back = by_length.argsort()
        places = torch.arange(int(lengths.sum())).split(lengths[by_length].tolist())
        given = torch.cat(logits)[back.to(logits[0].device)]
        return given, [places[i] for i in back.tolist()], caches

    def _fill(
        self, old: Tensor, stay: Tensor, caches: Sequence[ReadContexts], come: Sequence[Tensor]
    ) -> None:
        """Replace the cache: rows `old` at `stay`, the copies of each context at `come`."""
        filled = self._new_cache()
        start = self._positions - int(self._lengths[old].max()) if len(old) else 0
        for number, layer in enumerate(filled.layers):
            parts = [part for read in caches for part in read.rows(number, come)]
            if len(old):
                mine = self._cache.layers[number]
                index = old.to(mine.device)
                keys, values = (x[index, :, start:] for x in (mine.keys, mine.values))
                parts.append(Rows(keys, values, stay.to(mine.device)))
                self._cache.layers[number] = None
            layer.fill(parts)
        self._cache = filled

    def _begin_padded(
        self, contexts: Sequence[Sequence[int]], rows: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """As `_read_packed`; the cache holds the contexts `rows` [m], in that order."""
        tokens, mask = left_padded(contexts)
        self._cache, positions = self._new_cache(), (mask.cumsum(1) - 1).clamp(min=0)
        logits = self._forward(tokens, positions, self._cache, _LAST, attention_mask=mask)[:, -1]
        self._cache.batch_select_indices(rows.to(logits.device))
        self._mask = mask[rows]
        read = torch.arange(mask.numel()).view_as(mask)
        return logits, [row[own] for row, own in zip(read, mask, strict=True)]

    def read(self, tokens: Tensor) -> Tensor:
        """Read one more token [n] per row that has not left; returns logits [n, V]."""
        rows = self.rows
        given = torch.zeros(len(self.owners), dtype=torch.int64)
        given[rows] = tokens
        further = self._blocks() if self._packs else self._longer_mask()
        positions = self._lengths[:, None]
        logits = self._forward(given[:, None], positions, self._cache, _LAST, **further)[:, -1]
        self._lengths += 1
        return logits if len(rows) == len(given) else logits[rows.to(logits.device)]

    @property
    def _positions(self) -> int:
        return self._cache.get_seq_length()

    def _blocks(self) -> dict[str, Any]:
        lengths = self._lengths + 1
        blocks = blocks_of(lengths, self._positions + 1)
        return {"blocks": blocks, "masks": masks_of(blocks, lengths, self._cache.layers[0].keys)}

    def _longer_mask(self) -> dict[str, Any]:
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], dim=1)
        return {"attention_mask": self._mask}

    def leave(self, owners: Tensor) -> None:
        """Have the rows of `owners` [n] leave."""
        if not len(owners):
            return
        self.owners[torch.isin(self.owners, owners)] = -1
        rows = self.rows
        if not len(rows):
            self.clear()
        elif len(self.owners) - len(rows) > _SHARE_OF_EMPTY_ROWS * len(self.owners):
            device = getattr(self._cache.layers[0], "device", None)
            self._cache.batch_select_indices(rows.to(device))
            self.owners, self._lengths = self.owners[rows], self._lengths[rows]
            if not self._packs:
                self._mask = self._mask[rows]


class ReadContexts(NamedTuple):
    """Contexts that went through the model in one pass, in the order of their length.

    cache: keys and values of all of them as one row
    members: [n] the contexts' numbers
    """

    cache: Any
    runs: list[Run]
    members: Tensor

    def rows(self, number: int, come: Sequence[Tensor]) -> Iterator[Rows]:
        """Those of layer `number`, which drops them; `come`: the places of contexts' copies."""
        layer, self.cache.layers[number] = self.cache.layers[number], None
        sizes = [count * length for count, length in self.runs]
        states = zip(layer.keys[0].split(sizes, 1), layer.values[0].split(sizes, 1), strict=True)
        members = self.members.split([count for count, _ in self.runs])
        for run, mine, parts in zip(self.runs, members, states, strict=True):
            places = [come[i] for i in mine.tolist()]
            sources = torch.arange(run.contexts).repeat_interleave(
                torch.tensor([len(place) for place in places])
            )
            # [heads, tokens, D] -> [contexts, heads, length, D]
            keys, values = (x.unflatten(1, run).transpose(0, 1) for x in parts)
            index = sources.to(keys.device)
            yield Rows(keys[index], values[index], torch.cat(places).to(keys.device))


def passes_of(order: Tensor, lengths: Tensor) -> list[Tensor]:
    """Contexts of `lengths` [n] in this order, cut into passes of at most `_READ_AT_ONCE` tokens
    or one context."""
    passes: list[list[int]] = []
    tokens = _READ_AT_ONCE
    for number in order.tolist():
        tokens += int(lengths[number])
        if tokens > _READ_AT_ONCE:
            passes.append([])
            tokens = int(lengths[number])
        passes[-1].append(number)
    return [torch.tensor(numbers) for numbers in passes]


def left_padded(contexts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Tokens and mask [B, longest], padded on the left."""
    longest = max(len(context) for context in contexts)
    tokens = torch.zeros(len(contexts), longest, dtype=torch.int64)
    mask = torch.zeros(len(contexts), longest, dtype=torch.bool)
    for row, context in enumerate(contexts):
        tokens[row, longest - len(context) :] = torch.tensor(context)
        mask[row, longest - len(context) :] = True
    return tokens, mask


def use_decode_attention(model: Any) -> bool:
    """Have a model use `decode_attention` in place of torch's fused one; whether it does."""
    if model.config._attn_implementation != "sdpa":
        return False
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_ATTENTION, decode_attention)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
    model.set_attn_implementation(_ATTENTION)
    return True


def decode_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    blocks: Sequence[Block] = (),
    masks: Sequence[Tensor | None] = (),
    runs: Sequence[Run] = (),
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """[B, S, H, V] of `query` [B, H, S, D] over `key` [B, H / groups, positions, D] and `value`
    [B, H / groups, positions, V].

    With blocks, S is 1; with runs, B is 1. With neither: torch's fused attention.
    """
    if blocks:
        return _attend_by_blocks(query, key, value, blocks, masks, scaling), None
    if runs:
        return _attend_by_runs(query, key, value, runs, scaling), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )


def _attend_by_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Sequence[Block],
    masks: Sequence[Tensor | None],
    scaling: float | None,
) -> Tensor:
    rows, heads, _, size = query.shape
    # Query heads that share keys are several queries of one head: on CUDA no fused kernel takes a
    # mask and fewer key heads, and the one on CPU is up to 20x slower with them (bfloat16).
    query = query.reshape(rows, key.shape[1], -1, size)
    result = query.new_empty(*query.shape[:-1], value.shape[-1])
    for (begin, end, start), mask in zip(blocks, masks, strict=True):
        result[begin:end] = scaled_dot_product_attention(
            query[begin:end],
            key[begin:end, :, start:],
            value[begin:end, :, start:],
            attn_mask=mask,
            scale=scaling,
        )
    return result.view(rows, 1, heads, -1)


def _attend_by_runs(
    query: Tensor, key: Tensor, value: Tensor, runs: Sequence[Run], scaling: float | None
) -> Tensor:
    sizes = [count * length for count, length in runs]
    results = []
    for run, *parts in zip(runs, *(x[0].split(sizes, 1) for x in (query, key, value)), strict=True):
        # [heads, tokens, D] -> [contexts, heads, length, D]
        q, k, v = (x.unflatten(1, run).transpose(0, 1) for x in parts)
        scale, shared, size = scaling or q.shape[-1] ** -0.5, q.shape[1] != k.shape[1], v.shape[-1]
        # With values of another size than queries torch would hold all scores.
        q, k, v = (_widened(x, max(size, q.shape[-1])) for x in (q, k, v))
        result = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=shared
        )
        results.append(result[..., :size].transpose(1, 2).flatten(0, 1))
    return torch.cat(results)[None]


def _widened(x: Tensor, size: int) -> Tensor:
    """`x` [..., D] with zeros up to `size` channels; padding by 0 would copy it."""
    return x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1]))
