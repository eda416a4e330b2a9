"""Lay the samples of a microbatch out as the model's input, and find the rows that predict them.

Packed: all samples one after the other in one row, kept apart by the attention (a `PackedLayout` on
the local layers, THD on Transformer Engine). Padded: one row per sample, padded on the right. Both
give the same log-probs. Under context parallelism each rank holds its zigzag share of every sample
(`plugin.sharding.zigzag`); under sequence parallelism rows are padded to a multiple of the TP size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from plugin.batch_types import RolloutBatch
from plugin.config import TrainerConfig
from plugin.errors import ConfigError
from plugin.megatron_backend.model.packed_attention import PackedLayout
from plugin.megatron_backend.parallel_groups import ParallelGroups, loss_context
from plugin.ragged import Integers, Ragged, ragged_range
from plugin.sharding.sequence_shards import SequenceShards
from plugin.sharding.zigzag import num_chunks, padded_length

SequenceLayout = Literal["packed", "padded"]


def sequence_layout(config: TrainerConfig, *, transformer_engine: bool) -> SequenceLayout:
    """How a job lays out its rows.

    Microbatches of a number of samples are padded on the local layers. Context parallelism exists
    for packed rows only, and the interleaved schedule wants all microbatches of one shape, which
    packed rows are filled up to; so does --no-variable-seq-lengths.
    """
    packs = (
        transformer_engine
        or config.max_tokens_per_gpu is not None
        or config.context_parallel_size > 1
        or config.virtual_pipeline_model_parallel_size is not None
        or not config.variable_seq_lengths
    )
    return "packed" if packs else "padded"


@dataclass(frozen=True)
class ModelInputs:
    """One microbatch as the model sees it.

    tokens, position_ids: [B, S_local] int64 (B = 1 when packed)
    packed_seq_params: how the row is divided into samples; None when padded
    sample_ids: [B, S_local] int64 on the CPU, the sample of every token, -1 where it is padding;
        positions in the sample are `position_ids`
    rows: [R] int64, index into the flattened [B * S_local] output of the row that predicts each
        local response token; targets: [R] int64, those tokens
    host_rows: `rows` on the CPU
    shards: which response tokens of which sample these are
    """

    tokens: Tensor
    position_ids: Tensor
    packed_seq_params: Any
    sample_ids: Tensor
    rows: Tensor
    host_rows: Tensor
    targets: Tensor
    shards: SequenceShards


def model_inputs(
    batch: RolloutBatch,
    groups: ParallelGroups,
    *,
    layout: SequenceLayout = "packed",
    transformer_engine: bool = False,
    sequence_parallel: bool = False,
    at_least: int = 0,
    alignment: int = 1,
    device: torch.device | str = "cpu",
) -> ModelInputs:
    """Lay out the samples of `batch` for this rank.

    at_least: fewest tokens of a row, over all CP ranks; alignment: every rank's part of a row is a
        multiple of it
    """
    columns, samples = batch.columns, Ragged.of(batch.columns["unconcat_tokens"])
    shards = SequenceShards.of(
        columns["total_lengths"],
        columns["response_lengths"],
        torch.device(device),
        loss_context(groups),
    )
    length = row_length(batch, groups, layout, sequence_parallel, at_least, alignment)
    params: Any = None
    if layout == "packed":
        lengths = padded_length(samples.lengths, groups.cp_size)
        packed = PackedLayout.from_lengths(
            lengths,
            row_length=length,
            cp_size=groups.cp_size,
            cp_rank=groups.cp_rank,
        )
        positions, sample_ids = packed.positions[None], packed.sample_ids[None]
        starts = np.cumsum([0, *lengths])  # the last one is that of tail padding, -1
        whole = _at_starts(samples, starts[:-1], length)
        tokens, rows = whole[torch.from_numpy(starts)[sample_ids] + positions], shards.rows()
        params = packed.to(device)
        if transformer_engine:
            params = thd_params(lengths.tolist(), length, cp_size=groups.cp_size, device=device)
    elif groups.cp_size > 1:
        raise ConfigError(
            f"the padded layout with context parallel size {groups.cp_size} is not supported; use "
            "packed"
        )
    else:
        starts = np.arange(len(samples)) * length
        tokens = _at_starts(samples, starts, len(samples) * length).view(len(samples), length)
        positions = torch.arange(length).expand_as(tokens).contiguous()
        sample_ids = torch.arange(len(samples))[:, None].expand_as(tokens)
        rows = shards.rows(starts)
    totals = torch.from_numpy(np.append(shards.totals, 0))
    return ModelInputs(
        tokens=tokens.to(device, non_blocking=True),
        position_ids=positions.to(device, non_blocking=True),
        packed_seq_params=params,
        sample_ids=torch.where(positions < totals[sample_ids], sample_ids, -1),
        rows=rows.to(device, non_blocking=True),
        host_rows=rows,
        targets=shards.response_tokens(samples),
        shards=shards,
    )


def _at_starts(samples: Ragged, starts: Integers, length: int) -> Tensor:
    """[length] int64: every sample from its start on, 0 elsewhere."""
    tokens = torch.zeros(length, dtype=torch.int64)
    tokens[torch.from_numpy(ragged_range(starts, samples.lengths))] = samples.values.cpu().long()
    return tokens


def row_length(
    batch: RolloutBatch,
    groups: ParallelGroups,
    layout: SequenceLayout,
    sequence_parallel: bool,
    at_least: int = 0,
    alignment: int = 1,
) -> int:
    """Tokens (of all CP ranks) in a row that holds the samples of `batch`."""
    lengths = padded_length(batch.columns["unconcat_tokens"].lengths, groups.cp_size)
    needed = max(int(lengths.sum() if layout == "packed" else lengths.max()), at_least)
    holders = groups.tp_size if sequence_parallel else 1
    multiple = math.lcm(num_chunks(groups.cp_size), groups.cp_size * alignment) * holders
    return -(-needed // multiple) * multiple


def thd_params(
    lengths: Sequence[int],
    row_length: int,
    *,
    cp_size: int = 1,
    device: torch.device | str = "cpu",
) -> PackedSeqParams:
    """Transformer Engine's description of a packed row of samples of these padded lengths."""
    tail = row_length - sum(lengths)
    pieces = [*lengths, tail] if tail else lengths
    ends = torch.tensor([0, *accumulate(pieces)], dtype=torch.int32, device=device)
    # Only context parallelism reads the padded ends; given without it, every layer compares them
    # with the others on the host.
    padded = ends if cp_size > 1 else None
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=max(pieces),
        max_seqlen_kv=max(pieces),
    )
