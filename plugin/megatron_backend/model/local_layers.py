"""Layers for Megatron-Core's local spec, used where Transformer Engine is not: norm, RoPE, attention.

Stock local layers stop short in three places. Torch's norms refuse sequence parallelism, the local core
attention refuses context parallelism and packing, and RoPE numbers tokens by their index in the row. These
three modules replace them and share one description of a row of tokens, `PackedLayout`, which travels
through `GPTModel.forward(packed_seq_params=...)`, the same door as Transformer Engine's packing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from plugin.errors import BatchError, ConfigError

TAIL_PADDING = -1
"""Sample id of tokens that fill a row up to its budget and belong to no sample."""


@dataclass
class PackedLayout(PackedSeqParams):
    """Which sample and which position every token of a row belongs to.

    Two samples of 3 and 2 tokens, one token of tail padding, no context parallelism:
    `positions [0 1 2 0 1 0]`, `sample_ids [0 0 0 1 1 -1]`. A token attends to the tokens of its own
    sample at its own or an earlier position.

    With context parallelism each sample is padded to a multiple of 2*cp and cut into 2*cp chunks, of which
    rank r holds chunks r and 2*cp-1-r. `positions` and `sample_ids` ([S_local], int64) describe the
    tokens of this rank; `gathered_*` ([cp * S_local]) those of all ranks, rank after rank, which is the order
    in which keys and values arrive.
    """

    qkv_format: str = "sbhd"
    positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    sample_ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    gathered_positions: Tensor | None = None
    gathered_sample_ids: Tensor | None = None
    _visible: Tensor | None = field(default=None, repr=False, compare=False)

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        *,
        row_length: int | None = None,
        cp_size: int = 1,
        cp_rank: int = 0,
        device: torch.device | str = "cpu",
    ) -> PackedLayout:
        """Lays samples of the given lengths one after the other in a row of `row_length` tokens.

        `row_length` counts the tokens of all CP ranks; what the samples leave free becomes tail padding.
        Every length, and the row, must already be a multiple of 2 * cp_size when cp_size > 1.
        """
        total = sum(lengths)
        row_length = total if row_length is None else row_length
        pieces = [(index, length) for index, length in enumerate(lengths)]
        if row_length > total:
            pieces.append((TAIL_PADDING, row_length - total))
        if row_length < total:
            raise BatchError(
                f"samples of {list(lengths)} tokens need {total} positions but the row has "
                f"{row_length}; raise the row length or pack fewer samples"
            )
        by_rank = [_place_on_rank(pieces, cp_size, rank, device) for rank in range(cp_size)]
        positions, sample_ids = by_rank[cp_rank]
        return cls(
            positions=positions,
            sample_ids=sample_ids,
            gathered_positions=torch.cat([place[0] for place in by_rank]),
            gathered_sample_ids=torch.cat([place[1] for place in by_rank]),
        )

    def visible(self) -> Tensor:
        """[S_local, cp * S_local] bool: which gathered token (column) a local token (row) attends to."""
        if self._visible is None:
            key_positions, key_samples = self.positions, self.sample_ids
            if self.gathered_positions is not None and self.gathered_sample_ids is not None:
                key_positions, key_samples = self.gathered_positions, self.gathered_sample_ids
            same_sample = self.sample_ids[:, None] == key_samples[None, :]
            self._visible = same_sample & (key_positions[None, :] <= self.positions[:, None])
        return self._visible


def _place_on_rank(
    pieces: Sequence[tuple[int, int]], cp_size: int, cp_rank: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    positions, sample_ids = [], []
    for sample_id, length in pieces:
        local = zigzag_positions(length, cp_size, cp_rank, device)
        positions.append(local)
        sample_ids.append(torch.full_like(local, sample_id))
    return torch.cat(positions), torch.cat(sample_ids)


def zigzag_positions(
    length: int, cp_size: int, cp_rank: int, device: torch.device | str = "cpu"
) -> Tensor:
    """[length / cp_size] int64: positions of one sample that CP rank `cp_rank` holds, in their order.

    Chunks r and 2*cp-1-r of 2*cp equal ones, so that early (cheap) and late (costly) tokens pair up.
    """
    if cp_size == 1:
        return torch.arange(length, device=device)
    if length % (2 * cp_size):
        raise BatchError(
            f"a sample of {length} tokens cannot be cut into {2 * cp_size} equal chunks for context "
            f"parallel size {cp_size}; pad it to a multiple of {2 * cp_size}"
        )
    chunks = torch.arange(length, device=device).view(2 * cp_size, -1)
    return torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])


class SequenceParallelRMSNorm(torch.nn.Module):
    """RMSNorm over the last dimension, computed in float32, usable under sequence parallelism.

    Its weight is marked `sequence_parallel`: each TP rank sees only its slice of the sequence, and
    Megatron's `finalize_model_grads` sums the gradients of parameters that carry the mark.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        if config.normalization != "RMSNorm":
            raise ConfigError(
                f"normalization {config.normalization!r} is not supported by the local layers; "
                "use RMSNorm, or --transformer-impl transformer_engine"
            )
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes `x` [..., hidden_size]; same shape and dtype."""
        normalized = F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps)
        return self.weight * normalized.to(x.dtype)


class LayoutRotaryEmbedding(RotaryEmbedding):
    """RoPE whose angles follow the positions of a `PackedLayout` when there is one."""

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: TransformerConfig,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Any:
        """Positions [S_local] for a `PackedLayout`; otherwise the length that the parent computes.

        `GPTModel` hands whatever this returns to `forward`, so the positions need no side channel.
        """
        if isinstance(packed_seq_params, PackedLayout):
            return packed_seq_params.positions
        return super().get_rotary_seq_len(
            inference_context,
            transformer,
            transformer_input,
            transformer_config,
            packed_seq_params,
            **kwargs,
        )

    def forward(self, max_seq_len: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Angles [S_local, 1, 1, rotary_dim] of the given positions, or of positions 0..max_seq_len-1."""
        if not isinstance(max_seq_len, Tensor):
            return super().forward(max_seq_len, *args, **kwargs)
        scaled = max_seq_len.to(self.inv_freq.dtype)
        if self.seq_len_interpolation_factor is not None:
            scaled = scaled / self.seq_len_interpolation_factor
        angles = torch.outer(scaled, self.inv_freq)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class LocalCoreAttention(MegatronModule):
    """Grouped-query causal attention in plain torch, with packing and context parallelism.

    Under context parallelism keys and values are gathered over the CP group (their gradients are
    reduce-scattered back), and each rank attends from its own queries. That costs memory for the whole
    sequence per rank, which is fine for testing the layout; Transformer Engine's ring attention serves GPUs.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.layer_number = layer_number
        self.cp_group = pg_collection.cp
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """`query` [S, B, heads/tp, d], `key` and `value` [S, B, groups/tp, d] -> [S, B, heads/tp * d].

        `attention_mask` follows Megatron: broadcastable to [B, 1, S, S_keys], True where attention is
        forbidden. Without a mask and without a layout, each row is one causal sequence.
        """
        if attention_bias is not None:
            raise ConfigError("attention bias is not supported by the local attention; remove it")
        visible = self._visible(query, attention_mask, packed_seq_params)
        if self.cp_group.size() > 1:
            key = gather_from_sequence_parallel_region(key, group=self.cp_group)
            value = gather_from_sequence_parallel_region(value, group=self.cp_group)
        # [S, B, n, d] -> [B, n, S, d]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        context = self._attend(q, k, v, visible)
        seq, batch = query.shape[:2]
        return context.permute(2, 0, 1, 3).reshape(seq, batch, -1)

    def _visible(
        self, query: Tensor, attention_mask: Tensor | None, params: PackedSeqParams | None
    ) -> Tensor | None:
        """What each query may see, as SDPA wants it (True = visible); None means plain causal."""
        if params is not None:
            if not isinstance(params, PackedLayout):
                raise ConfigError(
                    f"the local attention got packing as {type(params).__name__}; pass a PackedLayout, "
                    "or use --transformer-impl transformer_engine"
                )
            if attention_mask is not None:
                raise BatchError("got a PackedLayout and an attention mask; pass only one of them")
            return params.visible()
        cp_size = self.cp_group.size()
        if attention_mask is not None:
            return ~attention_mask
        if cp_size == 1:
            return None
        whole_row = PackedLayout.from_lengths(
            [query.shape[0] * cp_size],
            cp_size=cp_size,
            cp_rank=self.cp_group.rank(),
            device=query.device,
        )
        return whole_row.visible()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        # Dropout of different TP ranks covers different heads and must differ, hence the forked state.
        with _forked_rng(dropout > 0.0):
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=visible,
                is_causal=visible is None,
                dropout_p=dropout,
                scale=self.softmax_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )


def _forked_rng(wanted: bool) -> Any:
    from contextlib import nullcontext

    return get_cuda_rng_tracker().fork() if wanted else nullcontext()


def use_local_layers(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """Puts this module's norm and attention into a stock local block spec (changed in place)."""
    block.layer_norm = SequenceParallelRMSNorm
    seen: set[int] = set()
    for layer in block.layer_specs:
        # Stock specs share one ModuleSpec between equal layers.
        if id(layer) not in seen:
            seen.add(id(layer))
            _replace_in_layer(layer)
    return block


def _replace_in_layer(layer: ModuleSpec) -> None:
    parts = layer.submodules
    parts.input_layernorm = SequenceParallelRMSNorm
    parts.pre_mlp_layernorm = SequenceParallelRMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = LocalCoreAttention
    if getattr(attention.q_layernorm, "__name__", "") != "IdentityOp":
        attention.q_layernorm = SequenceParallelRMSNorm
        attention.k_layernorm = SequenceParallelRMSNorm
