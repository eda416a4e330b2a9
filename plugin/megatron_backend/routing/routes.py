"""The routers of the live model, and the routes of a microbatch in the order they see its tokens.

Routes arrive as [tokens, moe_layers, topk] per sample, in any integer type that holds every expert;
samples of one microbatch may differ. A token may have *no route*: a row in which every entry, in
all layers, is -1, where an engine cannot say which experts it used. In an unsigned type every value
is an expert. The routers of a token without a route choose live, in the forward pass and again in
recomputation. It counts in `replay/live_tokens`, lowers `replay/coverage` and has no part in
`replay/agreement`. A token without a route in some layers only is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from plugin.batch_types import (
    Microbatch,
    check_routes,
    no_route,
    route_dtype,
)
from plugin.errors import ReplayError
from plugin.megatron_backend.model.builder import unwrap
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.step.sequence_packing import ModelInputs
from plugin.ragged import Integers, Ragged

#: Weights in bfloat16 have 8 bits each; a sum that is off by more was never normalized.
WEIGHT_SUM_TOLERANCE = 0.02


@dataclass(frozen=True)
class RoutedModel:
    """The routers of this rank's live chunks and what the whole model looks like.

    routers: index among all MoE layers of the model (not of this stage) -> router
    """

    routers: dict[int, TopKRouter]
    num_layers: int
    num_experts: int
    topk: int
    #: What the weights of a token sum up to in every layer; None where the router fixes no sum.
    weight_sum: float | None = None

    @property
    def route_layers(self) -> list[int]:
        """The MoE layers whose routes this rank is given: its own.

        A stage without any gets those of the first, which say which tokens have a route.
        """
        return sorted(self.routers) or [0]

    @classmethod
    def of(cls, chunks: Sequence[Any]) -> RoutedModel:
        """Find the routers by walking the live model; refuse what replay could not reach."""
        config = unwrap(chunks[0]).config
        mtp_layers = getattr(config, "mtp_num_layers", None)
        for refused, reason in (
            (
                not config.num_moe_experts,
                "routing replay needs a MoE model, and this one is dense; drop the replay flag",
            ),
            (
                config.moe_router_fusion,
                "--moe-router-fusion chooses experts in a fused kernel that never asks for "
                "replayed routes; turn it off",
            ),
            (
                config.moe_router_load_balancing_type == "sinkhorn",
                "sinkhorn load balancing never asks for replayed routes; use another type",
            ),
            (
                mtp_layers,
                f"{mtp_layers} MTP layers number themselves like decoder layers, so routes cannot "
                "be told apart; train without MTP",
            ),
        ):
            if refused:
                raise ReplayError(reason)
        pattern = config.moe_layer_freq
        if isinstance(pattern, int):
            pattern = [i % pattern == 0 for i in range(config.num_layers)]
        # Layer numbers are 1-based, as routers carry them.
        moe_layers = [i + 1 for i, is_moe in enumerate(pattern) if is_moe]
        routers: dict[int, TopKRouter] = {}
        modules = (pair for chunk in chunks for pair in unwrap(chunk).named_modules())
        for name, module in modules:
            if not isinstance(module, TopKRouter):
                continue
            number = module.layer_number
            if number not in moe_layers:
                raise ReplayError(
                    f"router {name} says it is layer {number}, which is no MoE layer of the model; "
                    "it would run without routes"
                )
            index = moe_layers.index(number)
            if index in routers:
                raise ReplayError(f"router {name} and another one both say they are layer {number}")
            routers[index] = module
        # Softmax over the chosen experts and normalized sigmoids sum up to 1 before scaling.
        softmax, topk = config.moe_router_score_function == "softmax", config.moe_router_topk
        free = config.moe_router_pre_softmax if softmax else topk == 1
        weight_sum = None if free else float(config.moe_router_topk_scaling_factor or 1.0)
        return cls(routers, len(moe_layers), config.num_moe_experts, topk, weight_sum)


class MicrobatchRoutes(NamedTuple):
    """Routes of one microbatch in the order in which this rank's routers see the tokens.

    experts: [rows, layers of this stage, topk]; has_route: [rows] bool, or None if all have one
    weights: as `experts`, float32; None where they are not replayed
    """

    experts: Tensor
    has_route: Tensor | None
    weights: Tensor | None = None


def routes_of(
    microbatch: Microbatch,
    inputs: ModelInputs,
    model: RoutedModel,
    groups: ParallelGroups,
    *,
    sequence_parallel: bool,
    with_weights: bool = False,
    sample_numbers: Sequence[int] | Integers | None = None,
) -> MicrobatchRoutes:
    """Check a microbatch's routes and bring them into the routers' order.

    Padding gets valid dummy routes, experts 0..topk-1, with equal weights.
    with_weights: replay the engine's weights too
    sample_numbers: sample numbers for errors; None = their places in the microbatch
    """
    columns = microbatch.batch.columns
    if "rollout_routed_experts" not in columns:
        raise ReplayError(
            "--use-rollout-routing-replay needs rollout_routed_experts and the batch has none; "
            "make the engine return its routed experts"
        )
    routes: Ragged = columns["rollout_routed_experts"]
    check_routes(
        routes,
        layers=len(model.route_layers),
        topk=model.topk,
        experts=model.num_experts,
        total_lengths=columns["total_lengths"],
        error=ReplayError,
        name=lambda i: f"sample {i if sample_numbers is None else sample_numbers[i]}",
    )
    dummy = torch.arange(model.topk).expand(1, len(model.route_layers), model.topk)
    # The dummy comes last: padding is at place -1.
    flat = torch.cat([routes.values.long(), dummy])
    routed = torch.cat([~no_route(routes.values).all(dim=1), torch.ones(1, dtype=torch.bool)])
    starts = torch.from_numpy(np.append(routes.starts, 0))
    places = token_places(inputs, starts, groups, sequence_parallel)
    has_route = routed[places]
    experts = torch.where(has_route[:, None, None], flat[places], dummy)
    device = inputs.tokens.device
    experts = experts.to(route_dtype(model.num_experts)).to(device)
    weights = None
    if with_weights:
        if "rollout_routed_weights" not in columns:
            raise ReplayError(
                "--use-rollout-routing-replay ids+weights needs rollout_routed_weights and the "
                "batch has none; make the engine return the weights of its routes, or use ids"
            )
        given: Ragged = columns["rollout_routed_weights"]
        if not microbatch.is_padding:
            check_weights(given, routes, model, sample_numbers)
        equal = torch.full((1, len(model.route_layers), model.topk), 1 / model.topk)
        weights = torch.cat([given.values.float(), equal])[places]
        weights = torch.where(has_route[:, None, None], weights, equal).to(device)
    all_routed = bool(has_route.all())
    return MicrobatchRoutes(experts, None if all_routed else has_route.to(device), weights)


def token_places(
    inputs: ModelInputs, starts: Tensor, groups: ParallelGroups, sequence_parallel: bool
) -> Tensor:
    """[rows] int64: the token of each row that this rank's routers see, -1 where it is padding.

    starts: the number of the first token of every sample of the microbatch
    """
    sample_ids = router_order(inputs.sample_ids, groups, sequence_parallel)
    positions = router_order(inputs.position_ids.cpu(), groups, sequence_parallel)
    return torch.where(sample_ids >= 0, starts[sample_ids] + positions, -1)


def router_order(values: Tensor, groups: ParallelGroups, sequence_parallel: bool) -> Tensor:
    """[B, S_local] values -> [rows] in the order in which this rank's routers see the tokens.

    Routers flatten sequence-major hidden states; under sequence parallelism each sees its slice of
    the sequence.
    """
    ordered = values.t()
    if sequence_parallel:
        ordered = ordered.chunk(groups.tp_size)[groups.tp_rank]
    return ordered.reshape(-1)


def check_weights(
    weights: Ragged,
    routes: Ragged,
    model: RoutedModel,
    sample_numbers: Sequence[int] | Integers | None = None,
) -> None:
    """Check that weights have the routes' shape, and the sum that the model's router gives them.

    Their values were checked with the batch.
    """
    numbers = range(len(routes)) if sample_numbers is None else sample_numbers
    if weights.values.shape != routes.values.shape:
        raise ReplayError(
            f"weights of routes have shape {tuple(weights.values.shape)}, the routes "
            f"{tuple(routes.values.shape)}; the engine has to report one weight per expert"
        )
    if model.weight_sum is None:
        return
    sums = weights.values.float().sum(dim=2)
    # Negated, so that NaN fails.
    wrong = ~((sums - model.weight_sum).abs() <= WEIGHT_SUM_TOLERANCE * model.weight_sum)
    places = (wrong & ~no_route(routes.values)).nonzero()
    if len(places):
        place, layer = places[0].tolist()
        sample, token = routes.place_of(place)
        raise ReplayError(
            f"weights of sample {numbers[sample]}, token {token}, MoE layer {layer} sum up to "
            f"{float(sums[place, layer]):.4g}, the model's router gives {model.weight_sum:.4g}; "
            "the engine has to report what it multiplies the experts' outputs with, normalized "
            "and scaled"
        )
