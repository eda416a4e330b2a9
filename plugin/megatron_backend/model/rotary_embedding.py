"""RoPE modules: frequencies of the model's config, positions of a `PackedLayout` if there is one.

They take the place of Megatron's `RotaryEmbedding` on the local layers and on Transformer Engine.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from plugin.megatron_backend.model.packed_attention import PackedLayout


class LayoutRotaryEmbedding(RotaryEmbedding):
    """RoPE with given frequencies, whose angles follow a `PackedLayout` when there is one.

    is_latent: angles of a layout are [S_local, 1, rotated], as latent attention wants them
    factor: with it, `forward` returns a pair of angles and factor, as latent attention wants YaRN
    """

    def __init__(
        self,
        inv_freq: Tensor,
        cp_group: Any,
        *,
        is_interleaved: bool = False,
        is_latent: bool = False,
        factor: float | None = None,
    ) -> None:
        """`inv_freq`: [rotated / 2] radians per position."""
        super().__init__(
            2 * len(inv_freq),
            1.0,
            rotary_interleaved=is_interleaved,
            use_cpu_initialization=True,
            cp_group=cp_group,
        )
        self.inv_freq = inv_freq
        self.is_latent, self.factor = is_latent, factor

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Any:
        """Positions [S_local] of a `PackedLayout` among the arguments, else the parent's length.

        `GPTModel` passes whatever this returns to `forward`, so the positions need no side channel.
        """
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, PackedLayout):
                return argument.positions
        return super().get_rotary_seq_len(*args, **kwargs)

    def forward(self, max_seq_len: Any, *args: Any, **kwargs: Any) -> Any:
        """Angles [S_local, 1, 1, rotated] of the given positions, or of 0..max_seq_len-1."""
        if isinstance(max_seq_len, Tensor):
            self.inv_freq = self.inv_freq.to(max_seq_len.device)
            angles = torch.outer(max_seq_len.to(self.inv_freq.dtype), self.inv_freq)
            if self.rotary_interleaved:
                angles = angles.repeat_interleave(2, dim=-1)
            else:
                angles = torch.cat((angles, angles), dim=-1)
            angles = angles[:, None] if self.is_latent else angles[:, None, None]
        else:
            angles = super().forward(max_seq_len, *args, **kwargs)
        return angles if self.factor is None else (angles, self.factor)


class RotaryEmbeddingPerWindow(torch.nn.Module):
    """Two RoPEs: of the layers without a window, and of those with one."""

    def __init__(self, full: LayoutRotaryEmbedding, windowed: LayoutRotaryEmbedding) -> None:
        super().__init__()
        self.full, self.windowed = full, windowed

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Any:
        """As of either."""
        return self.full.get_rotary_seq_len(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Angles [2, S_local, 1, 1, rotated], those of layers with a window last."""
        return torch.stack([self.full(*args, **kwargs), self.windowed(*args, **kwargs)])


class SelfAttentionPerWindow(SelfAttention):
    """Takes the angles of its kind of layer from `RotaryEmbeddingPerWindow`."""

    def forward(self, *args: Any, rotary_pos_emb: Tensor | None = None, **kwargs: Any) -> Any:
        """As the parent's, with angles [2, S_local, 1, 1, rotated]."""
        if rotary_pos_emb is not None:
            has_window = is_layer_window_attention(
                self.config.window_size, self.config.window_attn_skip_freq, self.layer_number
            )
            rotary_pos_emb = rotary_pos_emb[int(has_window)]
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb, **kwargs)


def scale_rotation(config: TransformerConfig, factor: float) -> None:
    """Make attention multiply cosine and sine by `factor`; `config` is changed.

    Megatron computes the factor from YaRN's settings, which its config class does not have as
    fields: 0.1 * mscale * log(scaling) + 1. With these it is exactly `factor`. Megatron-Core 0.19
    reads them when a layer is built.
    """
    if factor != 1.0:
        settings: Any = config
        settings.yarn_rotary_scaling_factor = math.e
        settings.yarn_mscale, settings.yarn_mscale_all_dim = 10.0 * (factor - 1.0), 0.0
