"""Linear attention by the gated delta rule (Qwen3-Next) on the local layers, with packing.

The module, its parameters and their cuts are Megatron-Core's `GatedDeltaNet`, and so is the rule in
plain torch that it has for deterministic runs. Stock, it refuses packed rows, and to be built
without the CUDA kernels of flash-linear-attention.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm import gated_delta_net as stock
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from plugin.errors import ConfigError
from plugin.megatron_backend.model.local_layers import SequenceParallelRMSNorm
from plugin.megatron_backend.model.packed_attention import PackedLayout


class _PlainNorm(SequenceParallelRMSNorm):
    """Multiplies by its weight where the other norms of the model multiply by 1 + weight."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(config, hidden_size, eps)
        self.is_centered = False
        torch.nn.init.ones_(self.weight)


class LocalGatedDeltaNet(stock.GatedDeltaNet):
    """Gated delta rule whose state and convolution restart with every sample of a row."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Stock wants flash-linear-attention, whose kernels only its own `forward` calls.
        reader: Any = sys.modules[stock.GatedDeltaNet.__init__.__module__]
        has_kernels, reader.HAVE_FLA = reader.HAVE_FLA, True
        try:
            super().__init__(*args, **kwargs)
        finally:
            reader.HAVE_FLA = has_kernels
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            for name in ("tensor_model_parallel", "partition_dim"):
                vars(parameter).pop(name, None)
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)

    def _setup_variant_attrs(self) -> None:
        """Name a kernel, as Megatron-Core 0.19 wants; only its own `forward` would call it."""
        super()._setup_variant_attrs()
        self.gated_delta_rule = stock.torch_chunk_gated_delta_rule

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [S, B, H] (this rank's slice of S under SP) -> the same shape, no bias."""
        projected, _ = self.in_proj(hidden_states)
        lengths = [len(projected)]
        if packed_seq_params is not None:
            if not isinstance(packed_seq_params, PackedLayout):
                raise ConfigError(
                    "the gated delta rule takes packed rows on the local layers only; use "
                    "--transformer-impl local"
                )
            lengths = packed_seq_params.lengths.tolist()
        mixed = torch.cat([self._mixed(part) for part in projected.split(lengths)])
        return self.out_proj(mixed)

    def _mixed(self, projected: Tensor) -> Tensor:
        """One sample: [S, B, q k v gate beta alpha], of this rank's heads -> [S, B, v]."""
        keys, values, heads = (
            size // self.tp_size for size in (self.qk_dim, self.v_dim, self.num_value_heads)
        )
        qkv, gate, beta, alpha = projected.transpose(0, 1).split(
            [2 * keys + values, values, heads, heads], dim=-1
        )
        length = qkv.shape[1]
        qkv = self.act_fn(self.conv1d(qkv.transpose(1, 2))[..., :length]).transpose(1, 2)
        query, key, value = qkv.split([keys, keys, values], dim=-1)
        query, key = (_normalized(x.unflatten(-1, (-1, self.key_head_dim))) for x in (query, key))
        repeats = self.num_value_heads // self.num_key_heads
        query, key = (x.repeat_interleave(repeats, dim=2) for x in (query, key))
        decay = -self.A_log.float().exp() * F.softplus(alpha.float() + self.dt_bias.float())
        output, _ = stock.torch_chunk_gated_delta_rule(
            query, key, value.unflatten(-1, (heads, -1)), g=decay, beta=beta.sigmoid()
        )
        gate = self.act_fn(gate.float()).unflatten(-1, (heads, -1))
        gated = (self.out_norm(output) * gate).to(projected.dtype)
        return gated.flatten(2).transpose(0, 1)


def _normalized(x: Tensor) -> Tensor:
    """`x` with vectors of length 1 in the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def delta_net_spec(attention: Any) -> ModuleSpec:
    """A gated delta net of the linear layers that `attention`, a local spec, is made of."""
    parts = attention.submodules
    return ModuleSpec(
        module=LocalGatedDeltaNet,
        submodules=stock.GatedDeltaNetSubmodules(
            in_proj=parts.linear_qkv, out_norm=_PlainNorm, out_proj=parts.linear_proj
        ),
    )
