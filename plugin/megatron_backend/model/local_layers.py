"""Norm, RoPE and attention for Megatron-Core's local spec, where Transformer Engine is not used.

Stock local layers stop short in three places. Torch's norms refuse sequence parallelism, the local
core attention refuses context parallelism and packing, and RoPE numbers tokens by their index in
the row. The norm and the attention here and `rotary_embedding` replace them. They share one
description of a row of tokens, `PackedLayout`, which is passed as
`GPTModel.forward(packed_seq_params=...)`, like Transformer Engine's packing.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

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
from plugin.megatron_backend.model.packed_attention import (
    PackedLayout,
    attend_in_blocks,
    masked_attention,
)


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
        layout = self._layout(query, attention_mask, packed_seq_params)
        if self.cp_group.size() > 1:
            key = gather_from_sequence_parallel_region(key, group=self.cp_group)
            value = gather_from_sequence_parallel_region(value, group=self.cp_group)
        # TP ranks have different heads, so their dropout must differ: hence the forked state.
        with get_cuda_rng_tracker().fork() if self._dropout_now() > 0.0 else nullcontext():
            if attention_mask is not None:
                context = self._attend_masked(query, key, value, ~attention_mask)
            elif layout is None:
                q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
                context = self._attend(q, k, v, is_causal=True).permute(2, 0, 1, 3)
            elif self._is_plain_causal(int(layout.lengths.max())):
                q, k, v = (x[:, 0] for x in (query, key, value))
                context = layout.batches.attend(q, k, v, self._attend)[:, None]
            else:
                if layout.cp_size > 1:
                    key, value = (x.index_select(0, layout.key_order) for x in (key, value))
                context = attend_in_blocks(
                    *(query, key, value, layout, self._attend),
                    window=self.window,
                    sinks=self.softmax_offset,
                )
        return context.flatten(2)

    def _layout(
        self, query: Tensor, attention_mask: Tensor | None, params: PackedSeqParams | None
    ) -> PackedLayout | None:
        """How the row is divided into samples; None where a mask or plain causality decides it."""
        if params is not None:
            if not isinstance(params, PackedLayout):
                raise ConfigError(
                    f"the local attention got packing as {type(params).__name__}; pass a "
                    "PackedLayout, or use --transformer-impl transformer_engine"
                )
            if attention_mask is not None:
                raise BatchError("got a PackedLayout and an attention mask; pass only one of them")
            return params
        if attention_mask is not None or self._is_plain_causal(query.shape[0]):
            return None
        return PackedLayout.from_lengths(
            [query.shape[0] * self.cp_group.size()],
            cp_size=self.cp_group.size(),
            cp_rank=self.cp_group.rank(),
            device=query.device,
        )

    def _is_plain_causal(self, longest: int) -> bool:
        """Whether a sample of `longest` tokens attends to all of its past, all on this rank."""
        sees_all = self.window is None or self.window >= longest
        return self.cp_group.size() == 1 and sees_all and self.softmax_offset is None

    def _attend_masked(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        if self.window is not None:
            visible = visible & torch.ones_like(visible).triu(1 - self.window)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        context = masked_attention(q, k, v, visible, self._attend, self.softmax_offset)
        return context.permute(2, 0, 1, 3)

    def _dropout_now(self) -> float:
        return self.dropout if self.training else 0.0

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
        """Attention [B, n, S, d] by the kernel that does not keep all scores.

        That one wants values of the queries' size, so the smaller are padded. On a CPU its backward
        in bfloat16 takes three times as long as in float32.
        """
        is_slow = q.device.type == "cpu" and q.dtype.itemsize == 2
        dtype = torch.float32 if is_slow else q.dtype
        size, shared = max(q.shape[-1], v.shape[-1]), q.shape[1] != k.shape[1]
        query, key, value = (
            (x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))).to(dtype)
            for x in (q, k, v)
        )
        if "attn_mask" in mask and mask["attn_mask"].is_floating_point():
            mask["attn_mask"] = mask["attn_mask"].to(dtype)
        context = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self._dropout_now(),
            scale=self.softmax_scale,
            enable_gqa=shared,
            **mask,
        )
        return context[..., : v.shape[-1]].to(v.dtype)


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
