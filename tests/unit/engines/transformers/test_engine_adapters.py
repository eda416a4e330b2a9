"""Adapters on an engine: what merged weights give, without sending the base again."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.engines.transformers.engine import TransformersEngine
from plugin.errors import WeightError
from plugin.weights.buckets import pack_buckets
from tests.parallel.tiny_models import hf_state_dict, tiny_qwen3
from tests.unit.engines.tiny_engines import PARAMETERS, REQUESTS

CONFIG = tiny_qwen3()
SCALE = 2.0


def adapters(seed: int) -> dict[str, Tensor]:
    """Of queries and ups, by PEFT's names."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in hf_state_dict(CONFIG).items():
        if name.endswith(("q_proj.weight", "up_proj.weight")):
            layer, (rows, columns) = (
                f"base_model.model.{name.removesuffix('.weight')}",
                weight.shape,
            )
            found[f"{layer}.lora_A.weight"] = torch.randn(2, columns, generator=generator)
            found[f"{layer}.lora_B.weight"] = torch.randn(rows, 2, generator=generator) * 0.05
    return found


def merged(seed: int) -> dict[str, Tensor]:
    state, found = hf_state_dict(CONFIG), adapters(seed)
    for name in state:
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" in found:
            halves = found[f"{layer}.lora_B.weight"], found[f"{layer}.lora_A.weight"]
            state[name] = state[name] + SCALE * halves[0] @ halves[1]
    return state


def load(engine: TransformersEngine, version: int, *parts: dict[str, Tensor]) -> None:
    tensors = {name: tensor for part in parts for name, tensor in part.items()}
    (bucket,) = pack_buckets(tensors.items())
    engine.load_weights(version, bucket, last=True)


def new_engine(**options: Any) -> TransformersEngine:
    return TransformersEngine(CONFIG.to_dict(), **options)


@pytest.mark.parametrize("interrupts", [None, "recompute"])
def test_a_version_of_adapters_alone_is_that_of_merged_weights(interrupts: Any) -> None:
    engine, plain = new_engine(lora_scale=SCALE, interrupts=interrupts), new_engine()
    load(engine, 0, hf_state_dict(CONFIG), adapters(0))
    for version in (1, 2):
        load(engine, version, adapters(version))
        load(plain, version, merged(version))
        mine, theirs = (one.generate(REQUESTS, PARAMETERS) for one in (engine, plain))
        for answer, other in zip(chain(*mine), chain(*theirs), strict=True):
            assert torch.equal(answer.tokens, other.tokens)
            assert set(answer.token_versions().tolist()) == {version}
            torch.testing.assert_close(answer.log_probs, other.log_probs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((adapters(0),), "without .* tensors, the first of them lm_head.weight"),
        ((hf_state_dict(CONFIG),), "the first of them adapters"),
        (
            (
                hf_state_dict(CONFIG),
                {"base_model.model.model.norm.lora_A.weight": torch.ones(2, 2)},
            ),
            "has no linear layer model.norm",
        ),
    ],
    ids=["no base", "no adapters", "no such layer"],
)
def test_half_of_what_adapters_need_is_refused(parts: Any, message: str) -> None:
    with pytest.raises(WeightError, match=message):
        load(new_engine(lora_scale=SCALE), 0, *parts)


def test_a_later_version_that_lacks_an_adapter_is_refused() -> None:
    engine, some = new_engine(lora_scale=SCALE), adapters(1)
    load(engine, 0, hf_state_dict(CONFIG), adapters(0))
    dropped = some.popitem()[0]
    with pytest.raises(WeightError, match=dropped):
        load(engine, 1, some)
