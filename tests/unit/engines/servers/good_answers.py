"""Answers of a vLLM and of an SGLang server as a MoE model gives them, to be spoiled."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy

from plugin.engines.expert_routes import RouteShape
from plugin.engines.protocol import GenerationRequest, SamplingParameters
from plugin.engines.servers.dialects import ResponseShape
from tests.unit.engines.servers.misbehaving_server import (
    LOG_PROBS,
    STOP,
    TOKENS,
    completion,
    sglang_response,
)

PARAMETERS = SamplingParameters(max_response_length=4, stop_token_ids=(STOP,), routed_experts=True)
PROMPT = (10, 11)
REQUEST = GenerationRequest(PROMPT, (7,))
#: 4 layers, of which 0, 1 and 3 have 4 experts; every token goes to 2 of them.
ROUTES = RouteShape((0, 1, 3), topk=2, experts=4, num_layers=4)
SHAPE = ResponseShape(vocab_size=96, max_model_len=256, routes=ROUTES)
#: [prompt + response - 1, layers, topk]
EXPERTS = numpy.tile(numpy.array([[0, 1], [2, 3], [3, 0], [1, 2]]), (4, 1, 1))


def npy(array: Any) -> str:
    buffer = io.BytesIO()
    numpy.save(buffer, numpy.asarray(array))
    return base64.b64encode(buffer.getvalue()).decode()


def vllm_answer(**changes: Any) -> dict[str, Any]:
    """A good answer, but for `changes` in its choice."""
    body = completion(list(TOKENS), list(LOG_PROBS), "stop")
    body["choices"][0] |= {"routed_experts": npy(EXPERTS.astype(numpy.uint8))} | changes
    return body


def sglang_answer(**changes: Any) -> dict[str, Any]:
    """A good answer, but for `changes` in its `meta_info`."""
    body = sglang_response(list(TOKENS), list(LOG_PROBS), "stop")
    packed = base64.b64encode(EXPERTS.astype(numpy.int32).tobytes()).decode()
    good = {"prompt_tokens": len(PROMPT), "weight_version": "v", "routed_experts": packed}
    body["meta_info"] |= good | changes
    return body
