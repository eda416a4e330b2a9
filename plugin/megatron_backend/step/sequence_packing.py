"""Lays the samples of a microbatch out as the model's input, and says where their predictions come out.

Packed: all samples one after the other in one row, kept apart by the attention (a `PackedLayout` on the local
layers, THD on Transformer Engine). Padded: one row per sample, filled up on the right. Both give the same
log-probs. Under context parallelism a sample is filled up to a multiple of 2 * cp and each rank holds two of
its 2 * cp chunks; under sequence parallelism a row is filled up to a multiple of the TP size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from plugin.batch_types import RolloutBatch
from plugin.errors import ConfigError
from plugin.megatron_backend.parallel_groups import ParallelGroups, loss_context
from plugin.sharding.response_rows import response_rows, response_tokens
from plugin.sharding.sequence_shards import SequenceShards

SequenceLayout = Literal["packed", "padded"]


@dataclass(frozen=True)
class ModelInputs:
    """One microbatch as the model sees it.

    tokens, position_ids: [B, S_local] int64 (B = 1 when packed)
    packed_seq_params: how the row is divided into samples; None when padded
    sample_ids: [B, S_local] int64 on the CPU, the sample of every token, -1 where the row is filled up; positions
        in the sample are `position_ids`
    rows: [R] int64, index into the flattened [B * S_local] output of the row that predicts each local response
        token; targets: [R] int64, those tokens
    shards: which response tokens of which sample these are
    """

    tokens: Tensor
    position_ids: Tensor
    packed_seq_params: Any
    sample_ids: Tensor
    rows: Tensor
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
    device: torch.device | str = "cpu",
) -> ModelInputs:
    """Lay out the samples of `batch` for this rank; rows are filled up to `at_least` tokens (of all CP ranks)."""
    columns = batch.columns
    shards = SequenceShards.of(
        columns["total_lengths"],
        columns["response_lengths"],
        torch.device(device),
        loss_context(groups),
    )
    row_multiple = _row_multiple(groups, sequence_parallel)
    build = _packed if layout == "packed" else _padded
    tokens, positions, sample_ids, params, rows = build(
        columns["unconcat_tokens"], shards, groups, row_multiple, at_least, transformer_engine
    )
    lengths = torch.tensor([*columns["total_lengths"], 0])
    return ModelInputs(
        sample_ids=torch.where(positions.cpu() < lengths[sample_ids], sample_ids, -1),
        tokens=tokens.to(device, non_blocking=True),
        position_ids=positions.to(device, non_blocking=True),
        packed_seq_params=params,
        rows=rows.to(device, non_blocking=True),
        targets=response_tokens(shards, [_on(ids, device) for ids in columns["unconcat_tokens"]]),
        shards=shards,
    )


def row_length(
    batch: RolloutBatch, groups: ParallelGroups, layout: SequenceLayout, sequence_parallel: bool
) -> int:
    """Tokens (of all CP ranks) in a row that holds the samples of `batch`."""
    samples = batch.columns["unconcat_tokens"]
    lengths = _filled_lengths(samples, groups.cp_size)
    needed = sum(lengths) if layout == "packed" else max(lengths)
    return _round_up(needed, _row_multiple(groups, sequence_parallel))


def _row_multiple(groups: ParallelGroups, sequence_parallel: bool) -> int:
    chunks = 2 * groups.cp_size if groups.cp_size > 1 else 1
    return chunks * (groups.tp_size if sequence_parallel else 1)


def _filled_lengths(samples: Sequence[Tensor], cp_size: int) -> list[int]:
    return [_round_up(len(ids), 2 * cp_size if cp_size > 1 else 1) for ids in samples]


def _packed(
    samples: Sequence[Tensor],
    shards: SequenceShards,
    groups: ParallelGroups,
    row_multiple: int,
    at_least: int,
    transformer_engine: bool,
) -> tuple[Tensor, Tensor, Tensor, Any, Tensor]:
    from plugin.megatron_backend.model.local_layers import PackedLayout

    cp_size, cp_rank = groups.cp_size, groups.cp_rank
    lengths = _filled_lengths(samples, cp_size)
    row_length = _round_up(max(sum(lengths), at_least), row_multiple)
    layout = PackedLayout.from_lengths(
        lengths, row_length=row_length, cp_size=cp_size, cp_rank=cp_rank, device=shards.device
    )
    pieces = [_filled(ids, length) for ids, length in zip(samples, lengths, strict=True)]
    if row_length > sum(lengths):
        pieces.append(torch.zeros(row_length - sum(lengths), dtype=torch.int64))
    local = torch.cat([_zigzag(piece, cp_size, cp_rank) for piece in pieces])
    rows = response_rows(shards, [len(ids) for ids in samples])
    params: Any = layout
    if transformer_engine:
        params = _thd_params([len(piece) for piece in pieces], shards.device)
    return local[None], layout.positions[None], layout.sample_ids.cpu()[None], params, rows


def _padded(
    samples: Sequence[Tensor],
    shards: SequenceShards,
    groups: ParallelGroups,
    row_multiple: int,
    at_least: int,
    transformer_engine: bool,
) -> tuple[Tensor, Tensor, Tensor, Any, Tensor]:
    if groups.cp_size > 1:
        raise ConfigError(
            f"the padded layout with context parallel size {groups.cp_size} is not supported; use packed"
        )
    length = _round_up(max(at_least, *(len(ids) for ids in samples)), row_multiple)
    tokens = torch.stack([_filled(ids, length) for ids in samples])
    rows = [
        i * length + torch.arange(len(ids) - response - 1, len(ids) - 1)
        for i, (ids, response) in enumerate(zip(samples, shards.response_lengths, strict=True))
    ]
    positions = torch.arange(length).expand_as(tokens).contiguous()
    sample_ids = torch.arange(len(samples))[:, None].expand_as(tokens)
    return tokens, positions, sample_ids, None, torch.cat(rows)


def _thd_params(lengths: Sequence[int], device: torch.device) -> Any:
    """Transformer Engine's description of a packed row; runs on CUDA only."""
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=ends,
        cu_seqlens_kv_padded=ends,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def _zigzag(values: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    if cp_size == 1:
        return values
    chunks = values.view(2 * cp_size, -1)
    return torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])


def _filled(ids: Tensor, length: int) -> Tensor:
    return torch.cat([ids.cpu(), ids.new_zeros(length - len(ids), device="cpu")])


def _on(ids: Tensor, device: torch.device | str) -> Tensor:
    return ids.to(device, non_blocking=True)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
