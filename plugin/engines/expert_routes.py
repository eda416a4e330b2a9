"""Routes as vLLM and SGLang report them, made to fit the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plugin.batch_types import check_routes, holds_experts, route_dtype
from plugin.errors import EngineError
from plugin.ragged import Ragged


@dataclass(frozen=True)
class RouteShape:
    """What the routes of a model look like.

    layers: numbers of the layers that have experts; topk: experts per token; experts: of each layer
    num_layers: of the model, dense ones included; None = unknown
    """

    layers: tuple[int, ...]
    topk: int
    experts: int
    num_layers: int | None = None

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> RouteShape:
        """The shape for a Hugging Face config; a dense model has no layers."""
        experts = _num_experts(hf_config)
        topk = int(hf_config.get("num_experts_per_tok") or 0)
        return cls(moe_layers(hf_config), topk, experts, int(hf_config["num_hidden_layers"]))


def moe_layers(hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Numbers of the layers that have experts.

    Example: 4 layers with decoder_sparse_step 2 and mlp_only_layers [3] leave layer 1; with
    first_k_dense_replace 1 they leave layers 1 to 3.
    """
    if not _num_experts(hf_config):
        return ()
    step, dense = hf_config.get("decoder_sparse_step") or 1, hf_config.get("mlp_only_layers") or ()
    first = int(hf_config.get("first_k_dense_replace") or 0)
    layers = range(first, int(hf_config["num_hidden_layers"]))
    return tuple(layer for layer in layers if (layer + 1) % step == 0 and layer not in dense)


def _num_experts(hf_config: Mapping[str, Any]) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return int(next((hf_config[name] for name in names if hf_config.get(name)), 0))


def continued_routes(before: Tensor | None, now: Tensor) -> Tensor:
    """Routes of a sequence that grew, each of the pass that the next token was sampled in.

    before: [tokens, ...] of the sequence when it was shorter, None at first. They stay, except that
        of the last token: the pass that read it is the one that `now` comes from.
    now: [more tokens, ...] of the sequence after it was read again and went on
    """
    return now if before is None else torch.cat([before[:-1], now[len(before) - 1 :]])


def complete_routes(routes: Tensor, length: int, shape: RouteShape) -> Tensor:
    """`routes` [length - 1 or length, all or MoE layers, topk] as [length, MoE layers, topk].

    An engine never reads the last token it samples and so has no route for it. No log-prob depends
    on that route; the row of the token before it stands in, because a replay needs a valid one.
    """
    if routes.dim() != 3 or len(routes) not in (length - 1, length) or not len(routes):
        raise EngineError(
            f"routed experts of shape {list(routes.shape)} where [{length - 1}, layers, topk] was "
            "expected"
        )
    layers = shape.layers
    if not layers or routes.shape[1] < len(layers):
        raise EngineError(
            f"routed experts of {routes.shape[1]} layers for a model with {len(layers)} MoE layers"
        )
    all_layers = shape.num_layers or max(routes.shape[1], layers[-1] + 1)
    if routes.shape[1] not in (len(layers), all_layers):
        raise EngineError(
            f"routed experts of {routes.shape[1]} layers for a model with {len(layers)} MoE layers "
            f"among {all_layers}"
        )
    if routes.shape[2] != shape.topk:
        raise EngineError(
            f"routed experts name {routes.shape[2]} experts per token, the model chooses "
            f"{shape.topk}"
        )
    if not holds_experts(routes.dtype, shape.experts):
        raise EngineError(
            f"routed experts are {routes.dtype}; they must be integers that hold {shape.experts} "
            "experts"
        )
    routes = routes.to(torch.int64)
    if routes.shape[1] > len(layers):
        routes = routes[:, list(layers)]
    if bool((routes < 0).any()):
        raise EngineError("routed experts hold a negative number: tokens without a recorded route")
    check_routes(
        Ragged.of([routes]),
        layers=len(layers),
        topk=shape.topk,
        experts=shape.experts,
        total_lengths=[len(routes)],
        error=EngineError,
        name=lambda _: "a response",
    )
    if len(routes) < length:
        routes = torch.cat([routes, routes[-1:]])
    return routes.to(route_dtype(shape.experts))
