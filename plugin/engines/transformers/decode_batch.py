"""The rows of a KV cache that decode together: rows join, read one token per step, and leave.

A padded cache makes every row as expensive as the longest one. Rows are kept in the order of their
length, so rows of similar length are a block, and a block attends to its own positions only. Keys
that several query heads share are not repeated in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

#: Rows that have left are taken out of the cache, which copies it, when they are so many of all.
_SHARE_OF_EMPTY_ROWS = 1 / 8
_ATTENTION = "megatron_tis_decode"
#: A row at least this long, compared with the longest of its block, belongs to it.
_SHORTEST_OF_BLOCK = 0.6


class Block(NamedTuple):
    """Rows `begin` to `end`, which see no position before `start`."""

    begin: int
    end: int
    start: int


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


Forward = Callable[[Tensor, Tensor, Tensor, Any, Sequence[Block] | None], Tensor]


class DecodeBatch:
    """Rows of different lengths, longest first, all of which end at the cache's last position.

    forward: tokens [B, S], mask [B, past + S], positions [B, S], cache, blocks of rows of similar
        length (None where the cache has no such rows) -> logits [B, V] of the last
    new_cache: makes an empty cache
    owners: [B] who each row belongs to, -1 where it has left
    """

    def __init__(self, forward: Forward, new_cache: Callable[[], Any]) -> None:
        self._forward, self._new_cache = forward, new_cache
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self._cache: Any = None
        self.owners = torch.empty(0, dtype=torch.int64)
        self._mask = torch.empty(0, 0, dtype=torch.bool)
        self._lengths = torch.empty(0, dtype=torch.int64)

    @property
    def is_open(self) -> bool:
        """Whether rows can be added: layers that forget positions cannot be aligned."""
        return self._cache is None or all(hasattr(layer, "join") for layer in self._cache.layers)

    @property
    def rows(self) -> Tensor:
        """[n] the rows that have not left."""
        return (self.owners >= 0).nonzero().flatten()

    def join(
        self, contexts: Sequence[Sequence[int]], copies: Tensor, owners: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Read every context once and add `copies` [n] rows of each; rows that have left go.

        owners: [m] of the new rows, in the order of the contexts
        Returns logits [m, V], and the mask [n, longest] of what was read: padding in front.
        """
        tokens, mask = left_padded(contexts)
        cache, positions = self._new_cache(), (mask.cumsum(1) - 1).clamp(min=0)
        logits = self._forward(tokens, mask, positions, cache, None)
        sources = torch.arange(len(copies)).repeat_interleave(copies)
        given = logits[sources.to(logits.device)]
        lengths = mask.sum(1)[sources]
        if self._cache is None:
            order = lengths.argsort(descending=True, stable=True)
            cache.batch_select_indices(sources[order].to(logits.device))
            self._cache, self._mask = cache, mask[sources[order]]
            self.owners, self._lengths = owners[order], lengths[order]
        else:
            rows, start = self.rows, self._first_used()
            lengths = torch.cat([self._lengths[rows], lengths])
            order = lengths.argsort(descending=True, stable=True)
            # Where each of the rows, and then each of the sources, comes to stand.
            places = order.argsort().to(logits.device).split([len(rows), len(sources)])
            which = (rows.to(logits.device), sources.to(logits.device))
            for ours, theirs in zip(self._cache.layers, cache.layers, strict=True):
                ours.join(start, theirs, which, places)
            self._mask = _aligned_masks(self._mask[rows, start:], mask[sources])[order]
            self.owners = torch.cat([self.owners[rows], owners])[order]
            self._lengths = lengths[order]
        return given, mask

    def read(self, tokens: Tensor) -> Tensor:
        """Read one more token [n] per row that has not left; returns logits [n, V]."""
        rows = self.rows
        given = torch.zeros(len(self.owners), dtype=torch.int64)
        given[rows] = tokens
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(given), 1)], dim=1)
        positions = self._lengths[:, None]
        blocks = blocks_of(self._lengths + 1, self._mask.shape[1]) if self.is_open else None
        logits = self._forward(given[:, None], self._mask, positions, self._cache, blocks)
        self._lengths += 1
        return logits if len(rows) == len(given) else logits[rows.to(logits.device)]

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
            self.owners, self._mask = self.owners[rows], self._mask[rows]
            self._lengths = self._lengths[rows]

    def _first_used(self) -> int:
        """The first position that a row which has not left can see."""
        return int(self._mask.shape[1] - self._lengths[self.rows].max())


def _aligned_masks(first: Tensor, second: Tensor) -> Tensor:
    """[n + m, longest] of two masks, ending at the same position."""
    longest = max(first.shape[1], second.shape[1])
    padded = [
        torch.nn.functional.pad(mask, (longest - mask.shape[1], 0)) for mask in (first, second)
    ]
    return torch.cat(padded)


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
    blocks: Sequence[Block] | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """[B, 1, H, V] of `query` [B, H, 1, D] over `key` [B, H / groups, positions, D] and `value`
    [B, H / groups, positions, V].

    Without `blocks`, and for several new tokens: torch's fused attention.
    """
    if blocks is None or query.shape[2] != 1:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    rows, heads, _, size = query.shape
    # Query heads that share keys are several queries of one head: on CUDA no fused kernel takes a
    # mask and fewer key heads, and the one on CPU is up to 20x slower with them (bfloat16).
    query = query.reshape(rows, key.shape[1], -1, size)
    result = query.new_empty(*query.shape[:-1], value.shape[-1])
    for begin, end, start in blocks:
        mask = None if attention_mask is None else attention_mask[begin:end, :, :, start:]
        result[begin:end] = scaled_dot_product_attention(
            query[begin:end],
            key[begin:end, :, start:],
            value[begin:end, :, start:],
            attn_mask=mask,
            scale=scaling,
        )
    return result.view(rows, 1, heads, -1), None
