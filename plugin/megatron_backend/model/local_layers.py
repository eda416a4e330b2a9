"""Norm, RoPE and attention for Megatron-Core's local spec, where Transformer Engine is not used.

Stock local layers stop short in three places. Torch's norms refuse sequence parallelism, the local
core attention refuses context parallelism and packing, and RoPE numbers tokens by their index in
the row. These three modules replace them and share one description of a row of tokens,
`PackedLayout`, which is passed as `GPTModel.forward(packed_seq_params=...)`, like Transformer
Engine's packing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
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

    def to(self, device: torch.device | str) -> PackedLayout:
        """The same layout with its tensors on `device`."""
        return PackedLayout(
            positions=self.positions.to(device, non_blocking=True),
            sample_ids=self.sample_ids.to(device, non_blocking=True),
            gathered_positions=self.gathered_positions.to(device, non_blocking=True),
        )

    @cached_property
    def visible(self) -> Tensor:
        """[S_local, cp * S_local] bool: the gathered tokens that each local one attends to."""
        cp_size = len(self.gathered_positions) // len(self.positions)
        same_sample = self.sample_ids[:, None] == self.sample_ids.repeat(cp_size)[None, :]
        return same_sample & (self.gathered_positions[None, :] <= self.positions[:, None])

    def visible_in(self, window: int | None) -> Tensor:
        """`visible`, restricted to the last `window` tokens, the token itself included."""
        if window is None:
            return self.visible
        if window not in self._windows:
            first = self.positions[:, None] - window + 1
            self._windows[window] = self.visible & (self.gathered_positions[None, :] >= first)
        return self._windows[window]

    @cached_property
    def _windows(self) -> dict[int, Tensor]:
        return {}


class SequenceParallelRMSNorm(torch.nn.Module):
    """RMSNorm over the last dimension, computed in float32, usable under sequence parallelism.

    With `layernorm_zero_centered_gamma` it multiplies by 1 + weight. The weight is marked
    `sequence_parallel`: each TP rank sees only its slice of the sequence, and
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
        self.is_centered = bool(getattr(config, "layernorm_zero_centered_gamma", False))
        first = torch.zeros if self.is_centered else torch.ones
        self.weight = torch.nn.Parameter(first(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` [..., hidden_size]; same shape and dtype."""
        normalized = F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps)
        if self.is_centered:
            return (normalized * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * normalized.to(x.dtype)


class LocalCoreAttention(MegatronModule):
    """Grouped-query causal attention in plain torch, with packing and context parallelism.

    Megatron's settings for layers with a window and for sinks are followed. A sink is one more
    logit per head in the softmax, a parameter, that takes probability and adds nothing.

    Under context parallelism keys and values are gathered over the CP group (their gradients are
    reduce-scattered back), and each rank attends from its own queries. That costs memory for the
    whole sequence per rank, which is fine for testing the layout; on GPUs use Transformer Engine's
    ring attention.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group = pg_collection.cp
        #: Computes attention; a plan of a job sets one that only has shapes.
        self.kernel: Callable[..., Tensor] = F.scaled_dot_product_attention
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        has_window = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window = config.window_size[0] + 1 if has_window and config.window_size else None
        self.softmax_offset: torch.nn.Parameter | None = None
        self.tp_group = pg_collection.tp
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // self.tp_group.size()
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The sinks, cut by heads, as Megatron's own attention saves them."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )

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

        Latent attention drops B = 1 where there is a layout.

        `attention_mask` follows Megatron: broadcastable to [B, 1, S, S_keys], True where attention
        is forbidden. Without a mask and without a layout, each row is one causal sequence.
        """
        if attention_bias is not None:
            raise ConfigError("attention bias is not supported by the local attention; remove it")
        if query.dim() == 3:
            query, key, value = (x[:, None] for x in (query, key, value))
        visible = self._visible(query, attention_mask, packed_seq_params)
        if self.cp_group.size() > 1:
            key = gather_from_sequence_parallel_region(key, group=self.cp_group)
            value = gather_from_sequence_parallel_region(value, group=self.cp_group)
        # [S, B, n, d] -> [B, n, S, d]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if self.softmax_offset is not None:
            k, v, visible = _with_sinks(q, k, v, visible, self.softmax_offset)
        dropout = self.dropout if self.training else 0.0
        # TP ranks have different heads, so their dropout must differ: hence the forked state.
        with get_cuda_rng_tracker().fork() if dropout > 0.0 else nullcontext():
            context = self.kernel(
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
            return params.visible_in(self.window)
        cp_size = self.cp_group.size()
        if attention_mask is not None and self.window is None:
            return ~attention_mask
        if cp_size == 1 and self.window is None and self.softmax_offset is None:
            return None
        row = PackedLayout.from_lengths(
            [query.shape[0] * cp_size],
            cp_size=cp_size,
            cp_rank=self.cp_group.rank(),
            device=query.device,
        ).visible_in(self.window)
        return row if attention_mask is None else row & ~attention_mask


def _with_sinks(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [B, n, S_keys + 1, d] with a last one of 0, and the mask that adds `sinks`.

    visible: broadcastable to [B, 1, S, S_keys]; sinks: [heads]
    """
    assert visible is not None
    k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    mask = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, float("-inf"))
    mask = mask.expand(q.shape[0], q.shape[1], *visible.shape[-2:])
    column = sinks.to(q.dtype)[None, :, None, None].expand(*mask.shape[:-1], 1)
    return k, v, torch.cat([mask, column], dim=-1)


def use_local_layers(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """Put this module's norm and attention into a stock local block spec (changed in place)."""
    block.layer_norm = SequenceParallelRMSNorm
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = SequenceParallelRMSNorm
        attention = parts.self_attention.submodules
        attention.core_attention = LocalCoreAttention
        for norm in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            if getattr(attention, norm, IdentityOp) is not IdentityOp:
                setattr(attention, norm, SequenceParallelRMSNorm)
    return block
