"""The HTTP engine and a job against a real vLLM server."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from plugin.batch_types import RolloutBatch
from plugin.config import JobConfig
from plugin.config.teachers import TeacherSpec
from plugin.engines.protocol import (
    Generation,
    GenerationRequest,
    SamplingParameters,
    check_generations,
)
from plugin.engines.servers.http_engine import HttpEngine
from plugin.teachers.http_teacher import HttpTeacher
from tests.parallel.tiny_models import hf_model, hf_state_dict
from tests.unit.engines.tiny_engines import load, reference_log_probs
from tests.vllm_rollouts.server_process import vllm_server
from tests.vllm_rollouts.small_job import check_steps, save_prompts, train
from tests.vllm_rollouts.small_model import vllm_config

pytestmark = pytest.mark.timeout(1500)

# Longer than vLLM's cache block on CPU (128 tokens), so that the prompt is found in the cache.
REQUEST = GenerationRequest(tuple(10 + i % 80 for i in range(300)), (1, 2, 3))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with weights of seed 5, which no test of the engine uses."""
    directory = tmp_path_factory.mktemp("served") / "model"
    hf_model(vllm_config(), seed=5).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    """One server for the file, because vLLM takes long to start."""
    with vllm_server(model, "--max-model-len", "512", "--max-num-seqs", "16") as address:
        yield address


def client(url: str, hf_config: dict[str, Any], weights: Path) -> HttpEngine:
    settings = {"rollout_url": url, "rollout_weights_dir": str(weights)}
    config = JobConfig(rollout_engine="http", rollout_request_timeout=120, **settings)
    return HttpEngine(config, hf_config, "engine")


@pytest.fixture
def engine(url: str, tmp_path: Path) -> HttpEngine:
    return client(url, vllm_config().to_dict(), tmp_path / "weights")


def served_label(url: str) -> str:
    with urllib.request.urlopen(f"{url}/weight_info", timeout=30) as answer:
        return json.load(answer)["weight_version"]


def change_label(url: str, label: str) -> None:
    body = json.dumps({"new_version": label}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/update_weight_version", body, headers)
    urllib.request.urlopen(request, timeout=30).close()


@pytest.mark.parametrize(
    "parameters",
    [
        SamplingParameters(temperature=0.7, max_response_length=8, stop_token_ids=(3, 4, 5, 6)),
        SamplingParameters(temperature=0.7, top_k=12, top_p=0.9, max_response_length=8),
    ],
)
def test_weights_reach_the_server_and_log_probs_are_of_the_sampled_distribution(
    engine: HttpEngine, url: str, parameters: SamplingParameters
) -> None:
    for version, seed in ((0, 0), (1, 1), (2, 0)):
        load(engine, hf_state_dict(vllm_config(), seed), version)
        assert served_label(url).endswith(f"-v{version}")
        answers = engine.generate([REQUEST], parameters)
        check_generations([REQUEST], answers, parameters)
        model = hf_model(vllm_config(), seed)
        for generation in answers[0]:
            assert isinstance(generation, Generation), generation
            assert generation.weight_version == version
            expected = reference_log_probs(model, REQUEST, generation, parameters)
            assert torch.allclose(generation.log_probs, expected, atol=1e-4)


def test_a_served_teacher_scores_tokens_as_transformers_does(engine: HttpEngine, url: str) -> None:
    load(engine, hf_state_dict(vllm_config(), 0))
    vocabulary, topk = vllm_config().vocab_size, 6
    tokens = [torch.tensor(REQUEST.prompt[:length]) for length in (40, 300)]
    responses = [30, 17]
    batch = RolloutBatch(
        {
            "unconcat_tokens": tokens,
            "total_lengths": [len(ids) for ids in tokens],
            "response_lengths": responses,
            "loss_masks": [torch.ones(n, dtype=torch.int64) for n in responses],
        }
    )
    spec = TeacherSpec("teacher", "--teacher-url", urls=(url,))
    config = JobConfig().unchecked_copy(distill_topk=topk)
    found = HttpTeacher(config, spec, vocabulary).score(batch)
    model = hf_model(vllm_config(), 0)
    for i, (ids, response) in enumerate(zip(tokens, responses, strict=True)):
        with torch.no_grad():
            rows = torch.log_softmax(model(ids[None]).logits[0, -response - 1 : -1], -1)
        own = rows.gather(1, ids[-response:, None])[:, 0]
        torch.testing.assert_close(found["teacher_log_probs"][i], own, rtol=0, atol=1e-4)
        best = rows.topk(topk, dim=1)
        assert torch.equal(found["teacher_topk_ids"][i].long(), best.indices)
        torch.testing.assert_close(
            found["teacher_topk_log_probs"][i], best.values, rtol=0, atol=1e-4
        )


def test_the_server_shows_by_its_metrics_that_it_generates(
    engine: HttpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(engine, hf_state_dict(vllm_config(), 0), 0)
    [server] = engine.pool.servers
    seen = set()
    engine._watch._interval = 0.02
    monkeypatch.setattr(engine._watch, "_looked", lambda: seen.add(server.progress))
    long = GenerationRequest((10, 11), (1,))
    engine.generate([long], SamplingParameters(max_response_length=400))
    assert server.reports_progress
    # One response, so counters of whole responses would move once.
    assert len(seen) > 3, seen


def test_the_same_seed_gives_the_same_response(engine: HttpEngine) -> None:
    load(engine, hf_state_dict(vllm_config(), 0))
    parameters = SamplingParameters(max_response_length=8)
    first, second = (engine.generate([REQUEST], parameters)[0] for _ in range(2))
    assert [a.tokens.tolist() for a in first] == [a.tokens.tolist() for a in second]
    assert len({tuple(a.tokens.tolist()) for a in first}) == 3


def test_a_server_whose_weights_were_changed_by_somebody_else_is_found_out(
    engine: HttpEngine, url: str
) -> None:
    load(engine, hf_state_dict(vllm_config(), 0))
    change_label(url, "somebody else's")
    parameters = SamplingParameters(max_response_length=4)
    answers = engine.generate([REQUEST], parameters)[0]
    assert "somebody else's" in answers[0].reason
    assert engine.pool.times_out == 1


def test_a_prompt_that_is_too_long_for_the_server_is_refused_with_its_message(
    url: str, tmp_path: Path
) -> None:
    config = vllm_config().to_dict() | {"max_position_embeddings": 4096}
    engine = client(url, config, tmp_path)
    load(engine, hf_state_dict(vllm_config(), 0))
    (answer,) = engine.generate(
        [GenerationRequest((10,) * 1000, (1,))], SamplingParameters(max_response_length=4)
    )[0]
    assert "HTTP 400" in answer.reason


def test_a_job_trains_on_a_servers_responses(url: str, model: Path, tmp_path: Path) -> None:
    lines = train(
        tmp_path / "run",
        *("--rollout-engine", "http", "--rollout-url", url),
        *("--rollout-weights-dir", str(tmp_path / "weights")),
        *save_prompts(model, tmp_path),
    )
    check_steps(lines)
    # The last batch was generated by the weights that the step before it made.
    assert int(served_label(url).rpartition("-v")[2]) >= len(lines) - 1
