"""Weight tables that mbridge does not have as they are needed here."""

from __future__ import annotations

from mbridge.models.llama import LLaMABridge
from mbridge.models.qwen3moe import Qwen3MoEBridge


class Qwen3MoEWeights(Qwen3MoEBridge):
    """Adds the dense layers that `mlp_only_layers` asks for."""

    _MLP_MAPPING = Qwen3MoEBridge._MLP_MAPPING | LLaMABridge._MLP_MAPPING
