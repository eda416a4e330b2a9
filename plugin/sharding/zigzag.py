"""The context-parallel zigzag: which tokens of a sample a rank holds, and what it predicts.

Under context parallelism a sample is padded to 2 * cp_size equal chunks, and rank r holds chunks r
and 2 * cp_size - 1 - r: an early, cheap one and a late, expensive one, which balances causal
attention. Without it a rank holds the whole sample. The token at position p is predicted by the
logits at position p - 1, so a response token belongs to the rank that holds the row before it.

Example, cp_size 2, total 8, response 5 (positions 3..7, predicted at 2..6): chunks of 2 are
[0,1][2,3][4,5][6,7]; rank 0 holds chunks 0 and 3, thus predicts position 7; rank 1 the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plugin.errors import BatchError

Span = tuple[int, int]


def num_chunks(cp_size: int) -> int:
    """How many equal chunks a sample is cut into."""
    return 2 * cp_size if cp_size > 1 else 1


def padded_length(total: int, cp_size: int) -> int:
    """`total` rounded up to a multiple of the number of chunks; ranks hold equal shares of it."""
    return -(-total // num_chunks(cp_size)) * num_chunks(cp_size)


def local_chunks(total: int, cp_rank: int, cp_size: int) -> list[Span]:
    """Half-open ranges of positions, padding included, that a rank holds, in their local order."""
    if cp_size == 1:
        return [(0, total)]
    chunk = padded_length(total, cp_size) // num_chunks(cp_size)
    return [(i * chunk, (i + 1) * chunk) for i in (cp_rank, 2 * cp_size - 1 - cp_rank)]


def local_positions(
    length: int, cp_rank: int, cp_size: int, device: torch.device | str = "cpu"
) -> Tensor:
    """[length / cp_size] int64: the positions of a sample of a padded length that a rank holds."""
    if length % num_chunks(cp_size):
        raise BatchError(
            f"a sample of {length} tokens cannot be cut into {num_chunks(cp_size)} equal chunks "
            f"for context parallel size {cp_size}; pad it to a multiple of {num_chunks(cp_size)}"
        )
    chunks = local_chunks(length, cp_rank, cp_size)
    return torch.cat([torch.arange(start, end, device=device) for start, end in chunks])


def response_spans(total: int, response: int, cp_rank: int = 0, cp_size: int = 1) -> list[Span]:
    """Half-open ranges of the response (0 = first token) that a rank predicts, one per chunk."""
    if cp_size == 1:
        return [(0, response)]
    first_prediction = total - response - 1
    spans = []
    for chunk_start, chunk_end in local_chunks(total, cp_rank, cp_size):
        start = max(chunk_start - first_prediction, 0)
        spans.append((start, max(start, min(chunk_end - first_prediction, response))))
    return spans


def prediction_rows(total: int, response: int, cp_rank: int = 0, cp_size: int = 1) -> Tensor:
    """[R] int64: of the rows that a rank holds of a sample, those that predict its tokens."""
    first_prediction = total - response - 1
    if first_prediction < 0 and response > 0:
        raise BatchError(
            f"a sample has total length {total} and response length {response}; a response needs "
            "at least one token before it to be predicted from"
        )
    rows, held = [], 0
    chunks = local_chunks(total, cp_rank, cp_size)
    spans = response_spans(total, response, cp_rank, cp_size)
    for (chunk_start, chunk_end), (start, end) in zip(chunks, spans, strict=True):
        rows.append(torch.arange(start, end) + first_prediction - chunk_start + held)
        held += chunk_end - chunk_start
    return torch.cat(rows)
