"""A tiny model, its engine, and its weights in buckets."""

from __future__ import annotations

from typing import Any

from plugin.rollout.transformers_engine import TransformersEngine
from plugin.rollout.weight_buckets import pack_buckets
from tests.parallel.tiny_models import FAMILIES, hf_state_dict


def load(engine: TransformersEngine, state: dict[str, Any], version: int = 0) -> None:
    """Send `state` in several buckets."""
    buckets = list(pack_buckets(state.items(), bucket_bytes=20_000))
    assert len(buckets) > 1
    for number, bucket in enumerate(buckets):
        engine.load_weights(version, bucket, last=number == len(buckets) - 1)


def loaded_engine(family: str = "qwen3", seed: int = 0, **options: Any) -> TransformersEngine:
    """An engine with weights of version 0."""
    config = FAMILIES[family]()
    engine = TransformersEngine(config.to_dict(), **options)
    load(engine, hf_state_dict(config, seed))
    return engine
