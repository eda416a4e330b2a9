"""Routes as vLLM and SGLang report them, made to fit the protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plugin.errors import EngineError
from plugin.rollout.engines.protocol import smallest_unsigned


def moe_layers(hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Numbers of the layers that have experts.

    Example: 4 layers with decoder_sparse_step 2 and mlp_only_layers [3] leave layer 1.
    """
    if not (hf_config.get("num_experts") or hf_config.get("num_local_experts")):
        return ()
    step, dense = hf_config.get("decoder_sparse_step") or 1, hf_config.get("mlp_only_layers") or ()
    return tuple(
        layer
        for layer in range(int(hf_config["num_hidden_layers"]))
        if (layer + 1) % step == 0 and layer not in dense
    )


def complete_routes(routes: Tensor, length: int, layers: Sequence[int]) -> Tensor:
    """`routes` [length - 1 or length, all or MoE layers, topk] as [length, MoE layers, topk] in the smallest type.

    layers: numbers of the MoE layers. An engine never reads the last token it samples and so has no route for it. No
    log-prob depends on that route; the row of the token before it stands in, because a replay needs a valid one.
    """
    if routes.dim() != 3 or len(routes) not in (length - 1, length) or not len(routes):
        raise EngineError(
            f"routed experts of shape {list(routes.shape)} where [{length - 1}, layers, topk] was expected"
        )
    if not layers or routes.shape[1] < len(layers):
        raise EngineError(
            f"routed experts of {routes.shape[1]} layers for a model with {len(layers)} MoE layers"
        )
    routes = routes.to(torch.int64)
    if routes.shape[1] > len(layers):
        routes = routes[:, list(layers)]
    if bool((routes < 0).any()):
        raise EngineError("routed experts hold a negative number: tokens without a recorded route")
    if len(routes) < length:
        routes = torch.cat([routes, routes[-1:]])
    return routes.to(smallest_unsigned(int(routes.max()) + 1))
