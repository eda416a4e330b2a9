"""Models that vLLM can run on CPU."""

from __future__ import annotations

from typing import Any

from plugin.config import JobConfig
from plugin.engines.vllm.engine import VllmEngine
from tests.parallel.tiny_models import ALL_FAMILIES

#: What a tiny model of a family needs so that vLLM's kernels on CPU take it.
_CHANGES: dict[str, dict[str, Any]] = {
    # vLLM refuses windows on some layers; heads of 32.
    "qwen2": {"use_sliding_window": False, "hidden_size": 128},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"], "intermediate_size": 64},
}


def vllm_config(family: str = "qwen3", **overrides: Any) -> Any:
    """A tiny config with heads of a size that vLLM's CPU attention knows."""
    settings: dict[str, Any] = {"num_hidden_layers": 2, "max_position_embeddings": 512}
    if family != "qwen2":
        settings["head_dim"] = 32
    return ALL_FAMILIES[family](**(settings | _CHANGES.get(family, {}) | overrides))


def vllm_engine(hf_config: Any, **flags: Any) -> VllmEngine:
    """An engine without weights, with the settings of `flags`; `hf_config` may be a mapping."""
    described = hf_config if isinstance(hf_config, dict) else hf_config.to_dict()
    config = JobConfig().unchecked_copy(rollout_engine="vllm", **flags)
    return VllmEngine(config, described, "engine")
