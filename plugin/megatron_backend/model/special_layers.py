"""Layers that some families need and Megatron's local layer spec does not have.

Latent attention (DeepSeek-V3): Megatron's local layer spec cuts the two projections into the
latents over tensor parallel ranks and gathers what they give. The gradient of the gathered
positional part of the keys is then that of one rank's heads only, so ranks would train it apart.
Transformer Engine's layers keep these projections whole on every rank; here a plain linear layer
does. Not needed once the local spec does the same.

Norms after attention and MLP, before they are added to the residual (GLM-4, Gemma 3)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class WholeWeight(MegatronModule):
    """Holds `weight` whole on every tensor parallel rank; in a checkpoint it is there once."""

    def __init__(self, config: TransformerConfig, weight: Tensor, tp_group: Any) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        self.weight = torch.nn.Parameter(weight)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The weight, not cut over tensor parallel ranks."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


# Megatron-Core 0.16 takes Transformer Engine to be there because its own wrapper can be imported,
# and then calls `isinstance` with a mock. Not needed once it looks at the class.
if not isinstance(multi_latent_attention.TELinear, type):
    multi_latent_attention.HAVE_TE = False


class WholeLinear(WholeWeight):
    """A linear layer without bias that every tensor parallel rank holds whole.

    Under sequence parallelism each rank sees its slice of the sequence; the mark on the weight
    makes Megatron sum the gradients.
    """

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int, tp_group: Any) -> None:
        empty = torch.empty(outputs, inputs, dtype=config.params_dtype)
        super().__init__(config, empty, tp_group)
        config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[S, B, inputs] -> [S, B, outputs], and no bias."""
        return F.linear(x, self.weight), None


class LocalLatentAttention(MLASelfAttention):
    """Latent attention whose projections into the latents are whole on every rank."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        group = self.pg_collection.tp
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = WholeLinear(config, config.hidden_size, width, group)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(
                config, config.hidden_size, config.q_lora_rank, group
            )


def add_post_norms(block: TransformerBlockSubmodules, norm: Any) -> TransformerBlockSubmodules:
    """Put `norm` behind the last linear layer of every attention and MLP; changed in place.

    Megatron's layers have no place for such norms; behind the linear layer they see what the
    residual gets, under sequence parallelism this rank's slice of it.
    """
    for layer in block.layer_specs:
        attention, mlp = layer.submodules.self_attention.submodules, _parts(layer.submodules.mlp)
        attention.linear_proj = _followed_by(attention.linear_proj, norm)
        mlp.linear_fc2 = _followed_by(mlp.linear_fc2, norm)
    return block


def _parts(mlp: Any) -> Any:
    """What an MLP's spec is made of; from Megatron-Core 0.17 on it may be a `functools.partial`."""
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules


def _followed_by(linear: Any, norm: Any) -> Any:
    """The row-parallel class `linear` with a norm of its output."""
    if hasattr(linear, "post_norm_of"):
        return linear  # layers of one kind share a spec

    class NormedLinear(linear):
        post_norm_of = linear

        def __init__(self, inputs: int, outputs: int, *, config: Any, **arguments: Any) -> None:
            super().__init__(inputs, outputs, config=config, **arguments)
            self.post_layernorm = norm(
                config=config, hidden_size=outputs, eps=config.layernorm_epsilon
            )
            # In a hook: an adapter of the layer has its own before it.
            self.register_forward_hook(_normalize)

    return NormedLinear


def _normalize(
    linear: Any, _inputs: Any, output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    return linear.post_layernorm(output[0]), output[1]
