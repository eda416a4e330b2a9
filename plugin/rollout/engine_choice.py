"""The engine that a configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plugin.config import JobConfig
from plugin.rollout.engine_protocol import RolloutEngine


def make_engine(config: JobConfig, hf_config: Mapping[str, Any], name: str) -> RolloutEngine:
    """Builds the engine in this process; its weights come with `load_weights`.

    hf_config: the policy's Hugging Face configuration; name: for messages and health
    """
    from plugin.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(
        hf_config,
        dtype=config.rollout_dtype,
        quantization=config.rollout_quantization,
        max_batch=config.rollout_max_batch,
        name=name,
    )
