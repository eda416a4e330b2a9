"""Norms after attention and MLP, before they are added to the residual (GLM-4, Gemma 3)."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor


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
