"""A tiny model, its engine, its weights in buckets, and what transformers says about a response."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plugin.config import JobConfig
from plugin.engines.protocol import (
    Generation,
    GenerationRequest,
    RolloutEngine,
    SamplingParameters,
)
from plugin.engines.servers.http_engine import HttpEngine
from plugin.engines.transformers.engine import TransformersEngine
from plugin.engines.transformers.sampling import sampling_log_probs
from plugin.weights.buckets import pack_buckets
from tests.parallel.tiny_models import FAMILIES, hf_state_dict

REQUESTS = [
    GenerationRequest(tuple(range(10, 13)), (1, 2, 3)),
    GenerationRequest(tuple(range(20, 28)), (4,)),
    GenerationRequest((30,), (5, 6)),
]
STOPS = tuple(range(3, 10))
PARAMETERS = SamplingParameters(temperature=0.7, max_response_length=10, stop_token_ids=STOPS)


def load(engine: RolloutEngine, state: dict[str, Any], version: int = 0) -> None:
    """Send `state` in several buckets."""
    buckets = list(pack_buckets(state.items(), bucket_bytes=20_000))
    assert len(buckets) > 1
    for number, bucket in enumerate(buckets):
        engine.load_weights(version, bucket, last=number == len(buckets) - 1)


def http_engine(hf_config: dict[str, Any], *urls: str, **flags: Any) -> HttpEngine:
    """A client of servers, which does not wait for their start unless `flags` say so."""
    settings = {"rollout_engine": "http", "rollout_url": ",".join(urls), "start_timeout": None}
    return HttpEngine(JobConfig().unchecked_copy(**settings | flags), hf_config, "engine")


def loaded_engine(family: str = "qwen3", seed: int = 0, **options: Any) -> TransformersEngine:
    """An engine with weights of version 0."""
    config = FAMILIES[family]()
    engine = TransformersEngine(config.to_dict(), **options)
    load(engine, hf_state_dict(config, seed))
    return engine


def reference_log_probs(
    model: torch.nn.Module,
    request: GenerationRequest,
    generation: Generation,
    parameters: SamplingParameters,
) -> Tensor:
    """[response] log-probs of the tokens in the distribution that `parameters` samples from."""
    tokens = torch.cat([torch.tensor(request.prompt), generation.tokens])
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, :-1]
    rows = sampling_log_probs(logits, parameters).gather(-1, tokens[1:, None]).squeeze(-1)
    return rows[-generation.tokens.numel() :]
