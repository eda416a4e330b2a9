"""A model that vLLM can run on CPU, and what transformers says about a response."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plugin.rollout.engine_protocol import Generation, GenerationRequest, SamplingParameters
from plugin.rollout.sampling import sampling_log_probs
from tests.parallel.tiny_models import FAMILIES


def vllm_config(family: str = "qwen3") -> Any:
    """A tiny config with heads of a size that vLLM's CPU attention knows."""
    return FAMILIES[family](head_dim=32, num_hidden_layers=2, max_position_embeddings=512)


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
