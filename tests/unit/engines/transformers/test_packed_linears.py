"""Linear layers multiply with packed copies of the weights that the model has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plugin.engines.protocol import Generation
from plugin.engines.transformers import linear_layers
from plugin.engines.transformers.linear_layers import PackedLinears
from tests.parallel.tiny_models import FAMILIES, hf_model, hf_state_dict
from tests.unit.engines.tiny_engines import (
    PARAMETERS,
    REQUESTS,
    load,
    loaded_engine,
    reference_log_probs,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_gives_what_the_layer_gives(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(320, 330, bias=bias), nn.Linear(330, 4)).to(dtype)
    model.requires_grad_(False)
    rows = [torch.randn(*shape, 320, dtype=dtype) for shape in ((1,), (7, 1), (3, 50), (64, 1))]
    expected = [model(row) for row in rows]
    packed = PackedLinears(model)
    packed.follow(0)
    # Only the first is large enough, and its weights are not looked at again.
    model[0].weight.zero_()
    exact = 1e-5 if dtype is torch.float32 else 2e-2
    for row, result in zip(rows, expected, strict=True):
        assert torch.allclose(model(row), result, atol=exact)
    packed.clear()
    assert torch.equal(
        model[0](rows[0]), torch.zeros(1, 330, dtype=dtype) + (model[0].bias if bias else 0)
    )


def test_a_hook_on_a_packed_layer_is_called() -> None:
    model, seen = nn.Sequential(nn.Linear(320, 330)).requires_grad_(False), []
    PackedLinears(model).follow(0)

    def double(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        seen.append(output.shape)
        return 2 * output

    plain = model(torch.ones(2, 320))
    model[0].register_forward_hook(double)
    assert torch.equal(model(torch.ones(2, 320)), 2 * plain) and seen == [(2, 330)]


def test_weights_that_are_written_to_within_a_version_are_packed_again() -> None:
    model = nn.Sequential(nn.Linear(320, 330, bias=False)).requires_grad_(False)
    packed, rows = PackedLinears(model), torch.ones(2, 320)
    packed.follow(0)
    model[0].weight.mul_(2)
    doubled = model[0].weight.sum(1)
    packed.follow(0)
    assert torch.allclose(model(rows), doubled.expand(2, -1), atol=1e-5)
    model[0].weight = nn.Parameter(-model[0].weight, requires_grad=False)
    packed.follow(0)
    assert torch.allclose(model(rows), -doubled.expand(2, -1), atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_with_packed_weights_gives_the_models_log_probs_version_by_version(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_layers, "_FEWEST_NUMBERS", 1)
    engine = loaded_engine(family)
    for version in (0, 1):
        if version:
            load(engine, hf_state_dict(FAMILIES[family](), seed=version), version)
        model = hf_model(FAMILIES[family](), seed=version)
        for request, group in zip(REQUESTS, engine.generate(REQUESTS, PARAMETERS), strict=True):
            for answer in group:
                assert isinstance(answer, Generation) and answer.log_probs is not None
                expected = reference_log_probs(model, request, answer, PARAMETERS)
                assert torch.allclose(answer.log_probs, expected, atol=1e-5)
