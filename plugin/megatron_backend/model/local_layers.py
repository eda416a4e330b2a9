"""Norm, RoPE and attention for Megatron-Core's local spec, where Transformer Engine is not used.

Stock local layers stop short in three places. Torch's norms refuse sequence parallelism, the local
core attention refuses context parallelism and packing, and RoPE numbers tokens by their index in
the row. These three modules replace them and share one description of a row of tokens,
`PackedLayout`, which is passed as `GPTModel.forward(packed_seq_params=...)`, like Transformer
Engine's packing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from plugin.errors import BatchError, ConfigError
from plugin.ragged import Integers
from plugin.sharding.zigzag import local_positions

TAIL_PADDING = -1
"""Sample id of tokens that fill a row up to its budget and belong to no sample."""


@dataclass(kw_only=True)
class PackedLayout(PackedSeqParams):
    """Which sample and which position every token of a row belongs to.

    Two samples of 3 and 2 tokens, one token of tail padding, no context parallelism:
    `positions [0 1 2 0 1 0]`, `sample_ids [0 0 0 1 1 -1]`. A token attends to the tokens of its own
    sample at its own or an earlier position.

    positions, sample_ids: [S_local] int64, of the tokens of this context parallel rank
    gathered_positions: [cp * S_local] int64, of the tokens of all of them, rank after rank, which
        is the order in which keys and values arrive; the sample ids are the same on every rank
    """

    qkv_format: str = "sbhd"
    positions: Tensor
    sample_ids: Tensor
    gathered_positions: Tensor

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int] | Integers,
        *,
        row_length: int | None = None,
        cp_size: int = 1,
        cp_rank: int = 0,
        device: torch.device | str = "cpu",
    ) -> PackedLayout:
        """Lay samples of these padded lengths one after the other in a row of `row_length` tokens.

        `row_length` counts the tokens of all CP ranks; what the samples leave free is tail padding.
        """
        total = int(sum(lengths))
        row_length = total if row_length is None else row_length
        if row_length < total:
            raise BatchError(
                f"samples of {list(lengths)} tokens need {total} positions but the row has "
                f"{row_length}; raise the row length or pack fewer samples"
            )
        pieces = np.array([*lengths, row_length - total])
        by_rank = [local_positions(pieces, rank, cp_size) for rank in range(cp_size)]
        ids = np.array([*range(len(lengths)), TAIL_PADDING])
        return cls(
            positions=torch.from_numpy(by_rank[cp_rank]).to(device),
            sample_ids=torch.from_numpy(np.repeat(ids, pieces // cp_size)).to(device),
            gathered_positions=torch.from_numpy(np.concatenate(by_rank)).to(device),
        )

    @cached_property
    def visible(self) -> Tensor:
        """[S_local, cp * S_local] bool: the gathered tokens that each local one attends to."""
        cp_size = len(self.gathered_positions) // len(self.positions)
        same_sample = self.sample_ids[:, None] == self.sample_ids.repeat(cp_size)[None, :]
        return same_sample & (self.gathered_positions[None, :] <= self.positions[:, None])


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
        """Normalize `x` [..., hidden_size]; same shape and dtype."""
        normalized = F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps)
        return self.weight * normalized.to(x.dtype)


class LayoutRotaryEmbedding(RotaryEmbedding):
    """RoPE whose angles follow the positions of a `PackedLayout` when there is one."""

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Any:
        """Positions [S_local] of a `PackedLayout` among the arguments, else the parent's length.

        `GPTModel` passes whatever this returns to `forward`, so the positions need no side channel.
        """
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, PackedLayout):
                return argument.positions
        return super().get_rotary_seq_len(*args, **kwargs)

    def forward(self, max_seq_len: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Angles [S_local, 1, 1, rotary_dim] of the given positions, or of 0..max_seq_len-1."""
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
    reduce-scattered back), and each rank attends from its own queries. That costs memory for the
    whole sequence per rank, which is fine for testing the layout; on GPUs use Transformer Engine's
    ring attention.
    """

    def __init__(
        self,
        config: TransformerConfig,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group = pg_collection.cp
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """Query [S, B, heads/tp, d], key and value [S, B, groups/tp, d] -> [S, B, heads/tp * d].

        `attention_mask` follows Megatron: broadcastable to [B, 1, S, S_keys], True where attention
        is forbidden. Without a mask and without a layout, each row is one causal sequence.
        """
        if attention_bias is not None:
            raise ConfigError("attention bias is not supported by the local attention; remove it")
        visible = self._visible(query, attention_mask, packed_seq_params)
        if self.cp_group.size() > 1:
            key = gather_from_sequence_parallel_region(key, group=self.cp_group)
            value = gather_from_sequence_parallel_region(value, group=self.cp_group)
        # [S, B, n, d] -> [B, n, S, d]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        # TP ranks have different heads, so their dropout must differ: hence the forked state.
        with get_cuda_rng_tracker().fork() if dropout > 0.0 else nullcontext():
            context = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=visible,
                is_causal=visible is None,
                dropout_p=dropout,
                scale=self.softmax_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        return context.permute(2, 0, 1, 3).flatten(2)

    def _visible(
        self, query: Tensor, attention_mask: Tensor | None, params: PackedSeqParams | None
    ) -> Tensor | None:
        """What each query may see, as SDPA wants it (True = visible); None means plain causal."""
        if params is not None:
            if not isinstance(params, PackedLayout):
                raise ConfigError(
                    f"the local attention got packing as {type(params).__name__}; pass a "
                    "PackedLayout, or use --transformer-impl transformer_engine"
                )
            if attention_mask is not None:
                raise BatchError("got a PackedLayout and an attention mask; pass only one of them")
            return params.visible
        if attention_mask is not None:
            return ~attention_mask
        cp_size = self.cp_group.size()
        if cp_size == 1:
            return None
        return PackedLayout.from_lengths(
            [query.shape[0] * cp_size],
            cp_size=cp_size,
            cp_rank=self.cp_group.rank(),
            device=query.device,
        ).visible


def use_local_layers(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """Put this module's norm and attention into a stock local block spec (changed in place)."""
    block.layer_norm = SequenceParallelRMSNorm
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = SequenceParallelRMSNorm
        attention = parts.self_attention.submodules
        attention.core_attention = LocalCoreAttention
        if attention.q_layernorm is not IdentityOp:
            attention.q_layernorm = attention.k_layernorm = SequenceParallelRMSNorm
    return block
