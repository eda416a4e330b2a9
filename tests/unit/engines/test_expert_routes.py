"""Routes that servers report."""

from __future__ import annotations

import base64
import io

import numpy
import pytest
import torch

from plugin.engines.expert_routes import RouteShape, complete_routes, moe_layers
from plugin.engines.servers.answers import routes_of_int32, routes_of_npy
from plugin.engines.servers.calls import MalformedAnswer
from plugin.errors import EngineError

# Three of four tokens, two layers, two experts each.
ROUTES = numpy.array([[[0, 1], [2, 3]], [[1, 0], [3, 2]], [[2, 0], [0, 3]]])
SHAPE = RouteShape((0, 1), topk=2, experts=4)


def npy(array: numpy.ndarray) -> str:
    buffer = io.BytesIO()
    numpy.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def test_the_token_that_no_engine_reads_gets_the_row_before_it() -> None:
    routes = complete_routes(torch.from_numpy(ROUTES), 4, SHAPE)
    assert routes.dtype is torch.int8
    assert routes.tolist() == [*ROUTES.tolist(), ROUTES[-1].tolist()]


def test_only_layers_with_experts_are_kept() -> None:
    # Layers 1 and 3 by the step of 2; 3 is dense by name.
    config = {"num_experts": 4, "num_hidden_layers": 4, "decoder_sparse_step": 2}
    assert moe_layers(config) == (1, 3)
    assert moe_layers(config | {"mlp_only_layers": [3]}) == (1,)
    assert moe_layers({"num_hidden_layers": 4}) == ()
    deepseek = {"num_hidden_layers": 4, "n_routed_experts": 8, "first_k_dense_replace": 1}
    assert moe_layers(deepseek) == (1, 2, 3)
    assert RouteShape.of(deepseek | {"num_experts_per_tok": 2}).experts == 8
    assert (
        complete_routes(torch.from_numpy(ROUTES), 3, RouteShape((1,), 2, 4)).tolist()
        == ROUTES[:, 1:].tolist()
    )


def test_both_encodings_are_read() -> None:
    packed = base64.b64encode(ROUTES.astype(numpy.int32).tobytes()).decode()
    expected = complete_routes(torch.from_numpy(ROUTES), 4, SHAPE)
    assert torch.equal(routes_of_npy(npy(ROUTES.astype(numpy.uint8)), 4, SHAPE), expected)
    assert torch.equal(routes_of_int32(packed, 4, SHAPE), expected)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "--enable-return-routed-experts"),
        ("%%", "not base64"),
        (base64.b64encode(b"abc").decode(), "no .npy array"),
        (npy(ROUTES[:1]), "where .3, layers, topk. was expected"),
        (npy(-ROUTES), "negative"),
        (npy(ROUTES + 1), "the model has experts 0..3"),
    ],
)
def test_routes_that_do_not_fit_are_malformed(value: str | None, message: str) -> None:
    with pytest.raises(MalformedAnswer, match=message):
        routes_of_npy(value, 4, SHAPE)


def test_routes_of_too_few_layers_are_refused() -> None:
    with pytest.raises(EngineError, match="1 layers for a model with 2 MoE layers"):
        complete_routes(torch.from_numpy(ROUTES[:, :1]), 4, SHAPE)


def test_the_type_of_routes_follows_from_the_model_and_has_room_for_no_route() -> None:
    many = RouteShape((0, 1), topk=2, experts=256)
    routes = complete_routes(torch.from_numpy(ROUTES + 252), 4, many)
    assert routes.dtype is torch.int16 and int(routes.max()) == 255
