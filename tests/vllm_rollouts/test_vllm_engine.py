"""vLLM in the process against transformers with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import count
from multiprocessing import get_context
from threading import Thread
from typing import Any

import pytest
import torch

from plugin.engines.protocol import (
    Generation,
    GenerationFailure,
    GenerationRequest,
    SamplingParameters,
    check_generations,
)
from plugin.engines.vllm.engine import VllmEngine
from plugin.errors import ConfigError, EngineError, WeightError
from plugin.weights.buckets import pack_buckets
from tests.parallel.tiny_models import hf_model, hf_state_dict
from tests.unit.engines.tiny_engines import PARAMETERS, REQUESTS, STOPS, reference_log_probs
from tests.unit.engines.tiny_engines import load as load_version
from tests.vllm_rollouts.small_model import vllm_config, vllm_engine

VERSIONS = count()

pytestmark = pytest.mark.timeout(900)


def load(engine: VllmEngine, state: dict[str, Any]) -> int:
    """Sends `state` in several buckets as the next version."""
    version = next(VERSIONS)
    load_version(engine, state, version)
    return version


def test_a_value_that_vllm_refuses_is_an_error_of_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"(?s)refuses what it is started.*correct --vllm-args"):
        vllm_engine(vllm_config(), vllm_args=("max_num_batched_tokens=-1",))


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    """One engine for the file, because vLLM takes long to start; weights of seed 0."""
    built = vllm_engine(vllm_config(), rollout_max_batch=16)
    load(built, hf_state_dict(vllm_config(), 0))
    yield built


def flat(answers: Any) -> list[tuple[GenerationRequest, Generation]]:
    return [(r, g) for r, answer in zip(REQUESTS, answers, strict=True) for g in answer]


@pytest.mark.parametrize(
    "parameters",
    [
        PARAMETERS,
        SamplingParameters(temperature=1.3, max_response_length=8),
        SamplingParameters(temperature=0.7, top_k=12, max_response_length=8),
        SamplingParameters(temperature=0.7, top_p=0.8, max_response_length=8),
        SamplingParameters(temperature=0.9, top_k=20, top_p=0.9, max_response_length=8),
    ],
)
def test_log_probs_are_those_of_the_distribution_that_was_sampled_from(
    engine: VllmEngine, parameters: SamplingParameters
) -> None:
    model = hf_model(vllm_config())
    answers = engine.generate(REQUESTS, parameters)
    check_generations(REQUESTS, answers, parameters)
    for request, generation in flat(answers):
        expected = reference_log_probs(model, request, generation, parameters)
        assert torch.allclose(generation.log_probs, expected, atol=2e-5)


def test_a_response_depends_on_its_seed_and_not_on_its_company(engine: VllmEngine) -> None:
    together = flat(engine.generate(REQUESTS, PARAMETERS))
    alone = [engine.generate([GenerationRequest(r.prompt, (s,))], PARAMETERS)[0][0]
             for r in REQUESTS for s in r.seeds]  # fmt: skip
    for (_, a), b in zip(together, alone, strict=True):
        assert torch.equal(a.tokens, b.tokens)
    assert len({tuple(g.tokens.tolist()) for _, g in together}) == len(together)


def test_a_stopped_response_ends_with_its_stop_token_and_others_are_full(
    engine: VllmEngine,
) -> None:
    many = [GenerationRequest((11, 12), tuple(range(40)))]
    answers = engine.generate(many, PARAMETERS)[0]
    assert {g.finish_reason for g in answers} == {"stop", "length"}
    for generation in answers:
        stops = torch.isin(generation.tokens, torch.tensor(STOPS))
        assert not bool(stops[:-1].any())
        assert bool(stops[-1]) == (generation.finish_reason == "stop")
        assert generation.finish_reason == "stop" or len(generation.tokens) == 10


def long_prompt_request() -> GenerationRequest:
    # Longer than vLLM's cache block on CPU (128 tokens): only whole blocks are found again.
    return GenerationRequest(tuple(10 + i % 80 for i in range(300)), (1, 2))


def test_prompts_that_are_too_many_for_one_step_are_read_one_after_the_other() -> None:
    # A part of a prompt ends with a draw that vLLM takes back, which no generator on CPU can.
    engine = vllm_engine(vllm_config(), vllm_args=("max_num_batched_tokens=512",))
    load(engine, hf_state_dict(vllm_config(), 0))
    requests = [
        GenerationRequest((first, *long_prompt_request().prompt), (1,)) for first in range(10, 14)
    ]
    answers = engine.generate(requests, PARAMETERS)
    check_generations(requests, answers, PARAMETERS)


def largest_error(engine: VllmEngine, seed: int) -> float:
    model, request = hf_model(vllm_config(), seed), long_prompt_request()
    return max(
        float((g.log_probs - reference_log_probs(model, request, g, PARAMETERS)).abs().max())
        for g in engine.generate([request], PARAMETERS)[0]
    )


def test_new_weights_are_used_from_the_next_response_on_also_for_a_cached_prompt(
    engine: VllmEngine,
) -> None:
    load(engine, hf_state_dict(vllm_config(), 0))
    assert largest_error(engine, seed=0) < 1e-4
    version = load(engine, hf_state_dict(vllm_config(), 1))
    assert largest_error(engine, seed=1) < 1e-4
    answers = engine.generate([long_prompt_request()], PARAMETERS)[0]
    assert {g.weight_version for g in answers} == {version}
    load(engine, hf_state_dict(vllm_config(), 0))


def test_without_the_reset_the_cached_prompt_would_give_log_probs_of_old_weights(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(engine, hf_state_dict(vllm_config(), 0))
    assert largest_error(engine, seed=0) < 1e-4
    with monkeypatch.context() as patch:
        patch.setattr(engine._llm.llm_engine, "reset_prefix_cache", lambda: True)
        load(engine, hf_state_dict(vllm_config(), 1))
        assert largest_error(engine, seed=1) > 1e-2
    load(engine, hf_state_dict(vllm_config(), 0))
    assert largest_error(engine, seed=0) < 1e-4


def test_a_cache_that_cannot_be_reset_leaves_the_engine_without_a_version(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine._llm.llm_engine, "reset_prefix_cache", lambda: False)
        with pytest.raises(EngineError, match="kept its prefix cache"):
            load(engine, hf_state_dict(vllm_config(), 1))
    with pytest.raises(EngineError, match="no weights"):
        engine.generate(REQUESTS, PARAMETERS)
    load(engine, hf_state_dict(vllm_config(), 0))


def test_half_a_version_cannot_generate_and_does_not_touch_the_weights(
    engine: VllmEngine,
) -> None:
    buckets = list(pack_buckets(hf_state_dict(vllm_config(), 1).items(), bucket_bytes=20_000))
    version = next(VERSIONS)
    for bucket in buckets[:-1]:
        engine.load_weights(version, bucket, last=False)
    with pytest.raises(EngineError, match="half of a new version"):
        engine.generate(REQUESTS, PARAMETERS)
    engine.load_weights(version, buckets[-1], last=True)
    assert largest_error(engine, seed=1) < 1e-4
    load(engine, hf_state_dict(vllm_config(), 0))


def test_incomplete_weights_are_refused_by_name(engine: VllmEngine) -> None:
    state = hf_state_dict(vllm_config(), 1)
    (rest,) = pack_buckets(item for item in state.items() if item[0] != "model.norm.weight")
    (norm,) = pack_buckets([("model.norm.weight", state["model.norm.weight"])])
    version = next(VERSIONS)
    with pytest.raises(WeightError, match=r"the first of them model\.norm\.weight"):
        engine.load_weights(version, rest, last=True)
    engine.load_weights(version, norm, last=True)
    assert engine.health().weight_version == version
    assert largest_error(engine, seed=1) < 1e-4
    load(engine, hf_state_dict(vllm_config(), 0))


def test_a_prompt_without_room_for_a_response_fails_alone(engine: VllmEngine) -> None:
    requests = [GenerationRequest((11,) * 512, (1, 2)), REQUESTS[1]]
    answers = engine.generate(requests, PARAMETERS)
    assert all(isinstance(a, GenerationFailure) and "512 tokens" in a.reason for a in answers[0])
    assert isinstance(answers[1][0], Generation)


def test_a_temperature_that_vllm_would_raise_is_refused(engine: VllmEngine) -> None:
    with pytest.raises(ConfigError, match=r"below 0\.01"):
        engine.generate(REQUESTS, SamplingParameters(temperature=0.001, max_response_length=2))


def test_heads_that_cpu_attention_does_not_know_are_an_error_before_the_first_token() -> None:
    config = vllm_config().to_dict() | {"head_dim": 16}
    with pytest.raises(ConfigError, match="heads of size 16"):
        vllm_engine(config)


def test_routes_are_refused_where_this_vllm_cannot_report_them() -> None:
    with pytest.raises(ConfigError, match="cannot report the experts"):
        vllm_engine(vllm_config("qwen3_moe"), detect_routing=True)


def interrupted_job() -> tuple[set[int], float]:
    """Versions of tokens, and how far log-probs are from those of the weights of their version.

    A thread loads new weights while vLLM decodes.
    """
    config = vllm_config(tie_word_embeddings=True)
    engine = vllm_engine(config, rollout_max_batch=4, partial_rollouts=True)
    load_version(engine, hf_state_dict(config, 0), 0)
    parameters = SamplingParameters(temperature=0.7, max_response_length=24)
    steps, threads, plain = 0, [], engine._llm.llm_engine.step

    def arrive() -> Any:
        nonlocal steps
        steps += 1
        if steps in (6, 12):
            state, version = hf_state_dict(config, steps // 6), steps // 6
            threads.append(Thread(target=load_version, args=(engine, state, version)))
            threads[-1].start()
            while not engine._pause_point._changes_waiting:
                threads[-1].join(0.001)
        return plain()

    engine._llm.llm_engine.step = arrive
    # More responses than fit, so that some begin after a change.
    requests = [*REQUESTS, GenerationRequest((40, 41), (7, 8))]
    answers = engine.generate(requests, parameters)
    check_generations(requests, answers, parameters)
    models, seen, furthest = [hf_model(config, seed) for seed in (0, 1, 2)], set(), 0.0
    for request, group in zip(requests, answers, strict=True):
        for generation in group:
            versions = generation.token_versions()
            assert torch.equal(versions, versions.sort().values)
            seen |= {tuple(versions.unique().tolist())}
            for version, model in enumerate(models):
                expected = reference_log_probs(model, request, generation, parameters)
                mine = versions == version
                far = (generation.log_probs - expected).abs()[mine]
                furthest = max(furthest, float(far.max()) if len(far) else 0.0)
    return seen, furthest


def test_every_token_of_an_interrupted_response_has_the_log_prob_of_its_version() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        seen, furthest = pool.submit(interrupted_job).result()
    assert (0, 1, 2) in seen and len(seen) > 1
    assert furthest < 1e-4


def largest_difference(family: str, dtype: Any) -> float:
    """Of log-probs of a new engine to transformers in float32, with two versions of the weights.

    The engine sleeps between them.
    """
    config = vllm_config(family, tie_word_embeddings=True)
    other = vllm_engine(config, rollout_dtype=dtype, rollout_max_batch=4)
    largest = 0.0
    for seed in (0, 1):
        other.sleep(2)
        other.wake("weights")
        load(other, hf_state_dict(config, seed))
        other.wake("cache")
        model = hf_model(config, seed)
        for r, g in flat(other.generate(REQUESTS, PARAMETERS)):
            difference = g.log_probs - reference_log_probs(model, r, g, PARAMETERS)
            largest = max(largest, float(difference.abs().max()))
    return largest


@pytest.mark.parametrize(
    ("family", "dtype", "low", "high"),
    [("qwen3_moe", "float32", 0.0, 1e-4), ("qwen3", "bfloat16", 1e-4, 0.5)],
)
def test_other_models_and_low_precision_stay_close_to_transformers(
    family: str, dtype: str, low: float, high: float
) -> None:
    # In a process of its own: vLLM's parallel groups are made once and depend on the model.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert low <= pool.submit(largest_difference, family, dtype).result() < high
