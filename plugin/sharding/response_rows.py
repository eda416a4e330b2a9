"""Where the logits of the response tokens are in the packed output of a model.

The model's output is [T, V]: the samples of a microbatch one after the other, possibly followed by padding.
The token at position p of a sample is predicted by the row of position p - 1. Under context parallelism a
sample is padded to a multiple of 2 * cp, and the local rows are its two local chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plugin.errors import BatchError
from plugin.sharding.sequence_shards import SequenceShards


def response_rows(shards: SequenceShards, total_lengths: Sequence[int]) -> Tensor:
    """[R] int64 on the CPU: the local row that predicts each local response token, in flat order."""
    rows, offset = [], 0
    cp_rank, cp_size = shards.context.cp_rank, shards.context.cp_size
    for total, response, spans in zip(
        total_lengths, shards.response_lengths, shards.spans, strict=True
    ):
        first_prediction = int(total) - response - 1
        if first_prediction < 0 and response > 0:
            raise BatchError(
                f"a sample has total length {total} and response length {response}; a response needs at "
                "least one token before it to be predicted from"
            )
        if cp_size == 1:
            start, end = spans[0]
            rows.append(torch.arange(start, end) + offset + first_prediction)
            offset += int(total)
            continue
        chunk = -(-int(total) // (2 * cp_size))
        for local_chunk, global_chunk, (start, end) in zip(
            (0, 1), (cp_rank, 2 * cp_size - 1 - cp_rank), spans, strict=True
        ):
            shift = first_prediction - global_chunk * chunk + local_chunk * chunk
            rows.append(torch.arange(start, end) + offset + shift)
        offset += 2 * chunk
    return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)


def response_tokens(shards: SequenceShards, tokens: Sequence[Tensor]) -> Tensor:
    """[R] int64: the local response tokens, in flat order, from the full token ids of every sample."""
    responses = []
    for i, (ids, length) in enumerate(zip(tokens, shards.response_lengths, strict=True)):
        if len(ids) < length:
            raise BatchError(
                f"sample {i} has {len(ids)} tokens but a response of {length}; unconcat_tokens holds prompt "
                "and response"
            )
        responses.append(ids[len(ids) - length :])
    return shards.local(responses).to(device=shards.device, dtype=torch.int64)
