"""What vLLM is started with on a machine without GPUs, in the engine's process or as a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_SMALLEST_CACHE, _LARGEST_CACHE = 64 << 20, 4 << 30


def cpu_options(
    hf_config: Mapping[str, Any],
    dtype: str,
    max_batch: int,
    max_model_len: int,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """No compilation, and room for the keys and values of a full batch; then what the user gives.

    vLLM would reserve 92 % of the machine's memory. A compiled graph would keep the packed weights
    that it was traced with.
    """
    heads = int(hf_config.get("num_key_value_heads") or hf_config["num_attention_heads"])
    element = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    width = 2 * int(hf_config["num_hidden_layers"]) * heads * head_size(hf_config) * element
    row = width * max_model_len
    wanted = max(_SMALLEST_CACHE, 2 * row, min(row * max_batch, _LARGEST_CACHE))
    # A size would win over the user's share.
    cache = {} if "gpu_memory_utilization" in given else {"kv_cache_memory_bytes": wanted}
    return {"enforce_eager": True, **cache, **given}


def head_size(hf_config: Mapping[str, Any]) -> int:
    """Channels of an attention head."""
    heads = int(hf_config["num_attention_heads"])
    return int(hf_config.get("head_dim") or int(hf_config["hidden_size"]) // heads)
