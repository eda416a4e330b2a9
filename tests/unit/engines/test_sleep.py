"""A transformers engine that sleeps gives its memory up, and wakes to the same responses."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from plugin.engines.transformers.engine import TransformersEngine
from plugin.errors import EngineError
from tests.held_bytes import bytes_held
from tests.parallel.tiny_models import FAMILIES, hf_state_dict
from tests.unit.engines.tiny_engines import PARAMETERS, REQUESTS, load, loaded_engine


def held(engine: TransformersEngine) -> int:
    return bytes_held(chain(engine.model.parameters(), engine.model.buffers()))


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_after_sleep_and_new_weights_responses_are_those_of_the_weights(
    level: int, quantization: str
) -> None:
    engine = loaded_engine(quantization=quantization)
    state = hf_state_dict(FAMILIES["qwen3"](), 0)
    expected = engine.generate(REQUESTS, PARAMETERS)
    before = held(engine)
    for version in (1, 2):
        engine.sleep(level)
        engine.sleep(level)  # twice does no harm
        assert held(engine) == 0
        with pytest.raises(EngineError, match="no weights"):
            engine.generate(REQUESTS, PARAMETERS)
        for part in ("weights", "weights", "cache"):
            engine.wake(part)  # type: ignore[arg-type]
        assert held(engine) == before
        with pytest.raises(EngineError, match="no weights"):
            engine.generate(REQUESTS, PARAMETERS)
        load(engine, state, version)
        answers = engine.generate(REQUESTS, PARAMETERS)
        for group, same in zip(expected, answers, strict=True):
            for one, other in zip(group, same, strict=True):
                assert torch.equal(one.tokens, other.tokens)
                assert torch.equal(one.log_probs, other.log_probs)


def test_a_version_may_be_sent_again_to_an_engine_that_slept() -> None:
    engine = loaded_engine()
    engine.sleep(2)
    engine.wake("weights")
    load(engine, hf_state_dict(FAMILIES["qwen3"](), 1), 0)
    assert engine.health().weight_version == 0
