"""Every tensor of a vLLM model comes from the trainer, with tied LM heads above all."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import pytest

from tests.parallel.tiny_models import ALL_FAMILIES

pytestmark = pytest.mark.timeout(1800)

#: Families whose model classes in vLLM 0.32 share the embedding's weight with the head. The experts
#: come first: vLLM makes its parallel groups once per process, and only with experts those of
#: experts as well.
TIED = ("qwen3_moe", "llama", "mistral", "qwen2", "qwen3", "glm4", "gemma3_text")
#: Its class ignores `tie_word_embeddings`.
UNTIED = ("glm4_moe",)
NOT_RUN = {
    "qwen3_next": "vLLM's class does not tie, and its delta rule on CPU is for bfloat16 only",
    "gpt_oss": "vLLM's class cannot reload experts and sinks, and is refused (tested below)",
    "deepseek_v3": "vLLM's class does not tie, and its latent attention on CPU is not exact",
}


def _largest_error(engine: Any, config: Any, seed: int, version: int) -> float:
    """Of the log-probs with new weights, against transformers."""
    from tests.parallel.tiny_models import hf_model, hf_state_dict
    from tests.unit.engines.tiny_engines import (
        PARAMETERS,
        REQUESTS,
        load,
        reference_log_probs,
    )

    load(engine, hf_state_dict(config, seed), version)
    model = hf_model(config, seed)
    answers = engine.generate(REQUESTS, PARAMETERS)
    return max(
        float((g.log_probs - reference_log_probs(model, r, g, PARAMETERS)).abs().max())
        for r, group in zip(REQUESTS, answers, strict=True)
        for g in group
    )


@contextmanager
def _engine(config: Any) -> Iterator[Any]:
    """An engine that is gone before the next one starts in this process."""
    from tests.vllm_rollouts.small_model import vllm_engine

    engine = vllm_engine(config, rollout_max_batch=16)
    try:
        yield engine
    finally:
        engine._llm.llm_engine.engine_core.shutdown()


def _drop_norm(worker: Any) -> None:
    """Have the next load of a worker pass over the last norm."""
    model = worker.model_runner.get_model()
    plain = model.load_weights

    def load_weights(weights: Any) -> Any:
        del model.load_weights
        return plain((n, t) for n, t in weights if n != "model.norm.weight")

    model.load_weights = load_weights


def _error_without_norm(engine: Any, config: Any) -> str:
    """What loading says when vLLM passes over a tensor; the engine then has no weights."""
    from plugin.errors import EngineError, WeightError
    from tests.parallel.tiny_models import hf_state_dict
    from tests.unit.engines.tiny_engines import PARAMETERS, REQUESTS, load

    engine._llm.llm_engine.collective_rpc(_drop_norm)
    with pytest.raises(WeightError) as raised:
        load(engine, hf_state_dict(config, 0), 10)
    with pytest.raises(EngineError, match="no weights"):
        engine.generate(REQUESTS, PARAMETERS)
    return str(raised.value)


def _all_families() -> dict[str, Any]:
    """Two versions of weights in an engine of every family; all engines in this process."""
    from plugin.errors import WeightError
    from tests.vllm_rollouts.small_model import vllm_config

    found: dict[str, Any] = {}
    for family in TIED + UNTIED:
        config = vllm_config(family, tie_word_embeddings=family in TIED)
        with _engine(config) as engine:
            found[family] = [_largest_error(engine, config, seed, seed) for seed in (0, 1)]
            if family == "llama":
                found["dropped"] = _error_without_norm(engine, config)
                found["mended"] = _largest_error(engine, config, 0, 11)
    for case, config in {
        "not tied": vllm_config("glm4_moe", tie_word_embeddings=True),
        "past the loaders": vllm_config("gpt_oss"),
    }.items():
        with _engine(config) as engine, pytest.raises(WeightError) as raised:
            _largest_error(engine, config, 0, 0)
        found[case] = str(raised.value)
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_all_families).result(timeout=1500)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_log_probs_are_transformers_after_every_version(found: dict[str, Any], family: str) -> None:
    if family in NOT_RUN:
        pytest.skip(NOT_RUN[family])
    first, second = found[family]
    assert first < 2e-5 and second < 2e-5


def test_a_tensor_that_vllm_does_not_load_is_named_and_nothing_is_generated(
    found: dict[str, Any],
) -> None:
    assert "loaded nothing into 1 of the" in found["dropped"]
    assert "the first of them model.norm.weight" in found["dropped"]
    assert found["mended"] < 2e-5


def test_a_tied_head_that_vllm_does_not_tie_is_an_error(found: dict[str, Any]) -> None:
    assert "the first of them lm_head.weight" in found["not tied"]


def test_weights_that_vllm_says_it_loaded_and_lost_are_an_error(found: dict[str, Any]) -> None:
    assert "into 10 of the" in found["past the loaders"]
    assert "the first of them model.layers.0.attn.sinks" in found["past the loaders"]
