"""Routes are checked before the step: every fault is a ReplayError that says where it is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from plugin.batch_types import Microbatch, RolloutBatch, check_routes
from plugin.errors import ReplayError
from plugin.megatron_backend.routing.routes import (
    MicrobatchRoutes,
    RoutedModel,
    check_weights,
    routes_of,
)
from plugin.megatron_backend.step.sequence_packing import model_inputs
from plugin.ragged import Ragged
from tests.unit.megatron_backend.rank_places import place

MODEL = RoutedModel(routers={0: None, 1: None}, num_layers=2, num_experts=4, topk=2)


def good_routes(tokens: int = 3) -> torch.Tensor:
    return torch.tensor([[0, 1], [2, 3]], dtype=torch.uint8).expand(tokens, 2, 2).clone()


def check(routes: torch.Tensor, *, sample: int = 0, tokens: int = 3) -> None:
    check_routes(
        Ragged.of([routes]), layers=2, topk=2, experts=4, total_lengths=[tokens],
        error=ReplayError, name=lambda i: f"sample {sample + i}",
    )  # fmt: skip


def test_good_routes_and_tokens_without_routes_pass() -> None:
    routes = good_routes().to(torch.int8)
    routes[1] = -1
    check(routes)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (good_routes(2), r"sample 7 have shape \(2, 2, 2\), expected \(3, 2, 2\)"),
        (good_routes()[:, :1], r"shape \(3, 1, 2\)"),
        (torch.zeros(3, 2, 2, dtype=torch.uint8), "token 0, MoE layer 0 name an expert twice"),
    ],
)
def test_wrong_shapes_and_doubled_experts_are_named(routes, message) -> None:
    with pytest.raises(ReplayError, match=message):
        check(routes, sample=7)


def test_an_expert_out_of_range_is_named_with_token_and_layer() -> None:
    routes = good_routes()
    routes[2, 1] = torch.tensor([1, 4])
    with pytest.raises(
        ReplayError, match=r"token 2, MoE layer 1 are \[1, 4\]; the model has experts 0..3"
    ):
        check(routes)


def test_minus_one_is_out_of_range() -> None:
    routes = good_routes().to(torch.int16)
    routes[0, 0, 0] = -1
    with pytest.raises(ReplayError, match="token 0, MoE layer 0"):
        check(routes)


def test_routes_in_some_layers_only_are_refused() -> None:
    routes = good_routes().to(torch.int8)
    routes[1, 0] = -1
    with pytest.raises(ReplayError, match="token 1 of sample 0 has routes in some layers only"):
        check(routes)


def test_padding_microbatches_carry_valid_routes_of_their_own() -> None:
    batch = RolloutBatch(
        {
            "unconcat_tokens": [torch.arange(3)],
            "total_lengths": [3],
            "response_lengths": [2],
            "loss_masks": [torch.ones(2, dtype=torch.int64)],
            "rollout_routed_experts": [good_routes()],
        }
    )
    padding = Microbatch.padding_like(batch)
    routes = padding.batch.columns["rollout_routed_experts"][0]
    assert routes.dtype == torch.uint8 and routes.tolist() == [[[0, 1], [0, 1]]] * 2
    check(routes, tokens=2)


def chunk_with(**changes: object) -> SimpleNamespace:
    config = {
        "num_moe_experts": 4,
        "moe_router_fusion": False,
        "moe_router_load_balancing_type": "none",
        "mtp_num_layers": None,
        "moe_layer_freq": 1,
        "num_layers": 2,
        "moe_router_topk": 2,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "moe_router_topk_scaling_factor": None,
    }
    return SimpleNamespace(config=SimpleNamespace(**(config | changes)), named_modules=list)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_moe_experts": None}, "this one is dense"),
        ({"moe_router_fusion": True}, "--moe-router-fusion"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
        ({"mtp_num_layers": 1}, "1 MTP layers"),
    ],
)
def test_models_whose_routers_replay_cannot_reach_are_refused(changes, message) -> None:
    with pytest.raises(ReplayError, match=message):
        RoutedModel.of([chunk_with(**changes)])


def test_layers_are_numbered_among_the_moe_layers_only() -> None:
    model = RoutedModel.of([chunk_with(moe_layer_freq=[0, 1, 1, 0, 1], num_layers=5)])
    assert model.num_layers == 3


def test_the_last_of_256_experts_is_a_route_and_a_row_of_minus_one_is_none() -> None:
    model = RoutedModel(routers={0: None, 1: None}, num_layers=2, num_experts=256, topk=2)
    routes = good_routes().to(torch.int16)
    routes[0] = torch.tensor([255, 3])

    def replayed() -> MicrobatchRoutes:
        batch = RolloutBatch(
            {
                "unconcat_tokens": [torch.arange(3)],
                "total_lengths": [3],
                "response_lengths": [2],
                "loss_masks": [torch.ones(2, dtype=torch.int64)],
                "rollout_routed_experts": [routes],
            }
        )
        inputs = model_inputs(batch, place(), at_least=4)
        return routes_of(Microbatch(batch), inputs, model, place(), sequence_parallel=False)

    # One row of padding, which gets experts 0 and 1.
    assert replayed().has_route is None
    assert replayed().experts[:, 0].tolist() == [[255, 3], [0, 1], [0, 1], [0, 1]]
    routes[0] = -1
    has_route = replayed().has_route
    assert has_route is not None and has_route.tolist() == [False, True, True, True]


def test_weights_that_a_router_would_not_give_are_refused() -> None:
    model = RoutedModel({0: None}, num_layers=1, num_experts=4, topk=2, weight_sum=2.5)
    routes = Ragged.of([torch.tensor([[[0, 1]], [[2, 3]], [[-1, -1]]], dtype=torch.int8)])
    # 2.5 up to the rounding of bfloat16; the last token has no route and may hold anything.
    good = torch.tensor([[[2.0, 0.5]], [[1.24, 1.255]], [[float("nan"), 0.0]]])
    check_weights(Ragged.of([good]), routes, model, [5])
    unscaled = good.clone()
    unscaled[1] = torch.tensor([0.6, 0.4])
    with pytest.raises(
        ReplayError, match=r"sample 5, token 1, MoE layer 0 sum up to 1, .* gives 2.5"
    ):
        check_weights(Ragged.of([unscaled]), routes, model, [5])
    with pytest.raises(ReplayError, match="one weight per expert"):
        check_weights(Ragged.of([good[:, :, :1]]), routes, model)
    free = RoutedModel({0: None}, num_layers=1, num_experts=4, topk=2)
    check_weights(Ragged.of([unscaled]), routes, free)


@pytest.mark.parametrize(
    ("changes", "weight_sum"),
    [
        ({}, 1.0),
        ({"moe_router_topk_scaling_factor": 2.5}, 2.5),
        ({"moe_router_pre_softmax": True}, None),
        ({"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": True}, 1.0),
        ({"moe_router_score_function": "sigmoid", "moe_router_topk": 1}, None),
    ],
)
def test_the_sum_of_a_tokens_weights_follows_from_the_router(changes, weight_sum) -> None:
    assert RoutedModel.of([chunk_with(**changes)]).weight_sum == weight_sum


def test_weights_follow_their_tokens_and_padding_gets_equal_ones() -> None:
    routes = good_routes().to(torch.int8)
    routes[1] = -1
    weights = torch.rand(3, 2, 2)
    weights[1] = float("nan")
    batch = RolloutBatch(
        {
            "unconcat_tokens": [torch.arange(3)],
            "total_lengths": [3],
            "response_lengths": [2],
            "loss_masks": [torch.ones(2, dtype=torch.int64)],
            "rollout_routed_experts": [routes],
        }
    )
    inputs = model_inputs(batch, place(), at_least=4)

    def replayed(batch: RolloutBatch) -> MicrobatchRoutes:
        return routes_of(
            Microbatch(batch), inputs, MODEL, place(), sequence_parallel=False, with_weights=True
        )

    with pytest.raises(ReplayError, match="needs rollout_routed_weights and the batch has none"):
        replayed(batch)
    got = replayed(batch.with_column("rollout_routed_weights", [weights])).weights
    equal = torch.full((2, 2), 0.5)
    torch.testing.assert_close(got, torch.stack([weights[0], equal, weights[2], equal]))
