"""Attention by sample gives what a dense mask of the whole row gives, at the cost of each sample's square."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plugin.megatron_backend.model.packed_attention import (
    CausalBatches,
    PackedLayout,
    attend_in_blocks,
)

HEADS, GROUPS, DIM = 4, 2, 8
KERNEL = partial(F.scaled_dot_product_attention, enable_gqa=True)


def row(tokens: int, heads: int) -> Tensor:
    return torch.randn(tokens, 1, heads, DIM, dtype=torch.float64, requires_grad=True)


def dense(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """Softmax over all pairs of the row, [S, B, n, d]; a sink adds exp(sink) to the denominator."""
    k, v = (x.repeat_interleave(HEADS // GROUPS, 2) for x in (key, value))
    scores = torch.einsum("sbnd,tbnd->bnst", query, k) / DIM**0.5
    weights = scores.masked_fill(~visible, float("-inf")).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[None, :, None, None]
    return torch.einsum("bnst,tbnd->sbnd", weights / total, v)


def visible_pairs(lengths: list[int], window: int | None = None) -> Tensor:
    """[S, S] by the definition: own sample, own or earlier position, within the window."""
    layout = PackedLayout.from_lengths(lengths)
    back = layout.positions[:, None] - layout.positions[None]
    same = layout.sample_ids[:, None] == layout.sample_ids[None]
    return same & (back >= 0) & (back < (window or 1 << 30))


def assert_same_gradients(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(found, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


LENGTHS = st.lists(st.integers(1, 90), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(LENGTHS)
def test_batches_of_similar_length_attend_as_a_dense_mask_does(lengths: list[int]) -> None:
    q, k, v = row(sum(lengths), HEADS), row(sum(lengths), GROUPS), row(sum(lengths), GROUPS)
    batches = PackedLayout.from_lengths(lengths).batches
    found = batches.attend(q[:, 0], k[:, 0], v[:, 0], KERNEL)[:, None]
    assert_same_gradients(found, dense(q, k, v, visible_pairs(lengths)), [q, k, v])


@settings(max_examples=40, deadline=None)
@given(
    lengths=LENGTHS,
    window=st.none() | st.integers(1, 100),
    has_sinks=st.booleans(),
    block=st.sampled_from([3, 64]),
)
def test_blocks_of_queries_attend_as_a_dense_mask_does(
    lengths: list[int], window: int | None, has_sinks: bool, block: int
) -> None:
    q, k, v = row(sum(lengths), HEADS), row(sum(lengths), GROUPS), row(sum(lengths), GROUPS)
    sinks = torch.randn(HEADS, dtype=torch.float64, requires_grad=True) if has_sinks else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plugin.megatron_backend.model.packed_attention.QUERY_BLOCK", block)
        found = attend_in_blocks(
            *(q, k, v, PackedLayout.from_lengths(lengths), KERNEL), window=window, sinks=sinks
        )
    expected = dense(q, k, v, visible_pairs(lengths, window), sinks)
    assert_same_gradients(found, expected, [q, k, v, *([sinks] if has_sinks else [])])


@pytest.mark.parametrize("cp_size", [2, 3])
@pytest.mark.parametrize("window", [None, 5])
def test_a_zigzag_rank_attends_from_its_chunks_to_all_earlier_keys(
    cp_size: int, window: int | None
) -> None:
    lengths = [12, 24, 36]  # multiples of 2 * cp_size
    total = sum(lengths)
    q, k, v = row(total, HEADS), row(total, GROUPS), row(total, GROUPS)
    whole = PackedLayout.from_lengths(lengths)
    expected = dense(q, k, v, visible_pairs(lengths, window))
    ranks = [
        PackedLayout.from_lengths(lengths, cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)
    ]
    starts = torch.from_numpy(np.cumsum(lengths) - lengths)
    held = [starts[rank.sample_ids] + rank.positions for rank in ranks]
    gathered = torch.cat(held)  # rank after rank, as keys arrive
    for rank, mine in zip(ranks, held, strict=True):
        keys, values = (x[gathered][rank.key_order] for x in (k, v))
        torch.testing.assert_close(keys, k)
        found = attend_in_blocks(q[mine], keys, values, rank, KERNEL, window=window)
        torch.testing.assert_close(found, expected[mine])
    assert len(whole.positions) == total


def test_a_packed_row_costs_the_squares_of_its_samples() -> None:
    """30 samples of 50 to 80 tokens: 2,000^2 pairs in the row, 30 x 65^2 in the samples."""
    lengths = np.linspace(50, 80, 30).astype(int)
    pairs: list[int] = []

    def counting(q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
        assert "attn_mask" not in mask
        pairs.append(q.shape[0] * q.shape[2] * k.shape[2])
        return KERNEL(q, k, v, **mask)

    total = int(lengths.sum())
    q, k, v = (torch.randn(total, heads, DIM) for heads in (HEADS, GROUPS, GROUPS))
    CausalBatches.of(lengths).attend(q, k, v, counting)
    assert sum(pairs) <= 1.6 * (lengths**2).sum() < total**2 / 18
    assert len(pairs) <= 3


def test_windows_cost_their_width_and_not_the_square_of_the_sample() -> None:
    sizes: list[int] = []

    def counting(q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
        sizes.append(mask["attn_mask"].numel())
        return KERNEL(q, k, v, **mask)

    q, k, v = (torch.randn(4096, 1, heads, DIM) for heads in (HEADS, GROUPS, GROUPS))
    attend_in_blocks(q, k, v, PackedLayout.from_lengths([4096]), counting, window=128)
    assert max(sizes) <= 512 * (512 + 128)
    assert sum(sizes) <= 4096 * (512 + 128)


def test_samples_of_one_length_are_one_batch_without_a_copy() -> None:
    batches = CausalBatches.of(np.array([7, 7, 7]))
    assert batches.shapes == ((3, 7),) and batches.place is None
    mixed = CausalBatches.of(np.array([2, 90, 100]))
    assert mixed.shapes == ((2, 100), (1, 2))


def test_blocks_of_the_same_form_share_a_mask() -> None:
    masks: list[Tensor] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor) -> Tensor:
        masks.append(attn_mask)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)

    layout = PackedLayout.from_lengths([8 * 512])
    row = torch.zeros(8 * 512, 1, 1, 4)
    attend_in_blocks(row, row, row, layout, kernel, window=512)
    # The first block sees itself, each of the others 511 tokens before it, too.
    assert len(masks) == 8 and len({id(mask) for mask in masks}) == 2
