"""The context-parallel zigzag: which tokens of a sample a rank holds, and what it predicts.

Under context parallelism a sample is padded to 2 * cp_size equal chunks, and rank r holds chunks r
and 2 * cp_size - 1 - r: an early, cheap one and a late, expensive one, which balances causal
attention. Without it a rank holds the whole sample. The token at position p is predicted by the
logits at position p - 1, so a response token belongs to the rank that holds the row before it.

Example, cp_size 2, total 8, response 5 (positions 3..7, predicted at 2..6): chunks of 2 are
[0,1][2,3][4,5][6,7]; rank 0 holds chunks 0 and 3, thus predicts position 7; rank 1 the others.

Lengths are NumPy arrays [N], one per sample; results are [N, chunks held] or flat over all samples.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from plugin.errors import BatchError
from plugin.ragged import Integers, ragged_range

Span = tuple[int, int]
Lengths = TypeVar("Lengths", int, Integers)


def num_chunks(cp_size: int) -> int:
    """How many equal chunks a sample is cut into."""
    return 2 * cp_size if cp_size > 1 else 1


def padded_length(total: Lengths, cp_size: int) -> Lengths:
    """`total` rounded up to a multiple of the number of chunks; ranks hold equal shares of it."""
    return -(-total // num_chunks(cp_size)) * num_chunks(cp_size)


def chunk_starts(totals: Integers, cp_rank: int, cp_size: int) -> tuple[Integers, Integers]:
    """The first position of each chunk that a rank holds [N, chunks held], and their length [N]."""
    if cp_size == 1:
        return np.zeros_like(totals)[:, None], totals
    chunk = padded_length(totals, cp_size) // num_chunks(cp_size)
    return np.stack([cp_rank * chunk, (2 * cp_size - 1 - cp_rank) * chunk], 1), chunk


def local_positions(lengths: Integers, cp_rank: int, cp_size: int) -> Integers:
    """[sum of lengths / cp_size] the positions that a rank holds of samples [N], in order.

    lengths: padded ones
    """
    uneven = lengths[lengths % num_chunks(cp_size) != 0]
    if len(uneven):
        raise BatchError(
            f"a sample of {int(uneven[0])} tokens cannot be cut into {num_chunks(cp_size)} equal "
            f"chunks for context parallel size {cp_size}; pad it to a multiple of "
            f"{num_chunks(cp_size)}"
        )
    starts, chunk = chunk_starts(lengths, cp_rank, cp_size)
    return ragged_range(starts.flatten(), np.repeat(chunk, starts.shape[1]))


def spans_of(totals: Integers, responses: Integers, cp_rank: int = 0, cp_size: int = 1) -> Integers:
    """[N, chunks held, 2] the ranges of each response (0 = first token) a rank predicts."""
    if cp_size == 1:
        return np.stack([np.zeros_like(responses), responses], 1)[:, None]
    starts, chunk = chunk_starts(totals, cp_rank, cp_size)
    first_prediction = (totals - responses - 1)[:, None]
    begin = (starts - first_prediction).clip(min=0)
    end = np.minimum(starts + chunk[:, None] - first_prediction, responses[:, None])
    return np.stack([begin, np.maximum(begin, end)], 2)


def response_spans(total: int, response: int, cp_rank: int = 0, cp_size: int = 1) -> list[Span]:
    """Half-open ranges of the response (0 = first token) that a rank predicts, one per chunk."""
    spans = spans_of(np.array([total]), np.array([response]), cp_rank, cp_size)
    return [(start, end) for start, end in spans[0].tolist()]


def prediction_rows(
    totals: Integers, responses: Integers, spans: Integers, cp_rank: int = 0, cp_size: int = 1
) -> Integers:
    """[R] for every local response token, the row among those held of its sample.

    spans: `spans_of` the same samples
    """
    orphans = np.flatnonzero((totals <= responses) & (responses > 0))
    if len(orphans):
        sample = orphans[0]
        raise BatchError(
            f"a sample has total length {totals[sample]} and response length "
            f"{responses[sample]}; a response needs at least one token before it to be "
            "predicted from"
        )
    starts, chunk = chunk_starts(totals, cp_rank, cp_size)
    held_before = np.arange(starts.shape[1]) * chunk[:, None]
    rows = spans[..., 0] + (totals - responses - 1)[:, None] - starts + held_before
    return ragged_range(rows.flatten(), (spans[..., 1] - spans[..., 0]).flatten())
