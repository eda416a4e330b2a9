"""The stand-in servers of the other suites speak as the installed vLLM does: fields, types and paths are its own."""

from __future__ import annotations

from typing import Any

import pytest

from plugin.engines.protocol import GenerationRequest, SamplingParameters
from plugin.engines.servers.dialects import VllmDialect
from plugin.teachers.score_dialects import ScoreRequest, VllmScores
from tests.unit.engines.servers.good_answers import SHAPE, vllm_answer
from tests.unit.teachers import stand_in_teacher

SCORED = ScoreRequest((1, 2, 3, 4), 2, topk=3)


def sent() -> list[Any]:
    """Bodies of our calls, for responses and for scores."""
    parameters = SamplingParameters(max_response_length=4, stop_token_ids=(3,), top_k=5)
    request = GenerationRequest((10, 11), (7,))
    calls = [VllmDialect(SHAPE).generation(request, parameters), VllmScores().call(SCORED)]
    return [call.payload for call in calls]


def answers() -> list[Any]:
    """What the stand-ins answer to such calls."""
    asked = dict(VllmScores().call(SCORED).payload or {})
    return [vllm_answer(), stand_in_teacher.vllm_answer(stand_in_teacher.table(), asked)]


@pytest.mark.parametrize("payload", sent())
def test_vllm_knows_every_field_of_our_calls(payload: Any) -> None:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    assert set(payload) <= set(CompletionRequest.model_fields)
    CompletionRequest.model_validate({**payload, "model": "m"})


@pytest.mark.parametrize("answer", answers())
def test_a_stand_in_answers_with_fields_that_vllm_has(answer: Any) -> None:
    from vllm.entrypoints.openai.completion import protocol

    [choice] = answer["choices"]
    assert set(choice) <= set(protocol.CompletionResponseChoice.model_fields)
    assert set(choice.get("logprobs") or ()) <= set(protocol.CompletionLogProbs.model_fields)
    usage = {"prompt_tokens": 1, "total_tokens": 1}
    whole = {**answer, "choices": [{"index": 0, **choice}], "model": "m", "usage": usage}
    protocol.CompletionResponse.model_validate(whole)


def test_vllm_has_the_paths_by_which_weights_are_updated() -> None:
    from vllm.entrypoints.rl.online import api_router as online
    from vllm.entrypoints.serve.dev.cache import api_router as cache
    from vllm.entrypoints.serve.dev.rpc import api_router as rpc

    known = {
        (route.path, *route.methods) for r in (online, cache, rpc) for route in r.router.routes
    }
    for call in VllmDialect(SHAPE).weight_update("directory", "label", abort=True):
        assert (call.path.split("?")[0], call.method) in known
