"""A model that vLLM can run on CPU."""

from __future__ import annotations

from typing import Any

from tests.parallel.tiny_models import FAMILIES


def vllm_config(family: str = "qwen3") -> Any:
    """A tiny config with heads of a size that vLLM's CPU attention knows."""
    return FAMILIES[family](head_dim=32, num_hidden_layers=2, max_position_embeddings=512)
