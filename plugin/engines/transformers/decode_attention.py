"""Attention of one new token per row, over rows of very different lengths.

A padded cache makes every row as expensive as the longest one. Rows are kept in the order of their
length, so rows of similar length are a block, and a block attends to its own positions only. Keys
that several query heads share are not repeated in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NAME = "megatron_tis_decode"
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


def use_decode_attention(model: Any) -> bool:
    """Have a model use `decode_attention` in place of torch's fused one; whether it does."""
    if model.config._attn_implementation != "sdpa":
        return False
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, decode_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
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
    """[B, 1, H, D] of `query` [B, H, 1, D] over `key`, `value` [B, H / groups, positions, D].

    Without `blocks`, and for several new tokens: torch's fused attention.
    """
    if blocks is None or query.shape[2] != 1:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    rows, heads, _, size = query.shape
    # On CUDA no fused kernel takes a mask and fewer key heads: the query heads that share keys are
    # several queries of one head there. On CPU its own way with fewer key heads is up to 3x faster.
    if query.is_cuda:
        query = query.reshape(rows, key.shape[1], -1, size)
    result = torch.empty_like(query)
    for begin, end, start in blocks:
        mask = None if attention_mask is None else attention_mask[begin:end, :, :, start:]
        result[begin:end] = scaled_dot_product_attention(
            query[begin:end],
            key[begin:end, :, start:],
            value[begin:end, :, start:],
            attn_mask=mask,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return result.view(rows, 1, heads, size), None
