"""Weight tables that mbridge does not have as they are needed here.

Names on the left are Megatron's, as with Transformer Engine; those on the right Hugging Face's.
"""

from __future__ import annotations

import re
from typing import ClassVar

import torch
from mbridge.core.llm_bridge import LLMBridge
from mbridge.models.llama import LLaMABridge
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen2moe import Qwen2MoEBridge
from mbridge.models.qwen3moe import Qwen3MoEBridge
from torch import Tensor

_LAYER = "model.layers.{layer_number}."


class Qwen3MoEWeights(Qwen3MoEBridge):
    """Adds the dense layers that `mlp_only_layers` asks for."""

    _MLP_MAPPING = Qwen3MoEBridge._MLP_MAPPING | LLaMABridge._MLP_MAPPING


class GLM4MoEWeights(Qwen2MoEBridge):
    """mbridge's GLM4MoEBridge without the import of all of its models."""

    _MLP_MAPPING = (
        Qwen2MoEBridge._MLP_MAPPING
        | Qwen2Bridge._MLP_MAPPING
        | {
            "mlp.router.expert_bias": [f"{_LAYER}mlp.gate.e_score_correction_bias"],
            "shared_experts.linear_fc1.weight": [
                f"{_LAYER}mlp.shared_experts.gate_proj.weight",
                f"{_LAYER}mlp.shared_experts.up_proj.weight",
            ],
            "shared_experts.linear_fc2.weight": [f"{_LAYER}mlp.shared_experts.down_proj.weight"],
        }
    )


def _attention_with_norm(after: str) -> dict[str, list[str]]:
    """Llama's names, and a norm after attention, which is inside the last linear layer."""
    inside = "self_attention.linear_proj.post_layernorm.weight"
    return Qwen2Bridge._ATTENTION_MAPPING | {inside: [f"{_LAYER}{after}.weight"]}


def _mlp_with_norms(before: str, after: str) -> dict[str, list[str]]:
    return Qwen2Bridge._MLP_MAPPING | {
        "mlp.linear_fc1.layer_norm_weight": [f"{_LAYER}{before}.weight"],
        "mlp.linear_fc2.post_layernorm.weight": [f"{_LAYER}{after}.weight"],
    }


class GLM4Weights(Qwen2Bridge):
    """Gates above ups in one tensor, as Megatron has them; not in mbridge."""

    _ATTENTION_MAPPING = _attention_with_norm("post_self_attn_layernorm")
    _MLP_MAPPING = _mlp_with_norms("post_attention_layernorm", "post_mlp_layernorm") | {
        "mlp.linear_fc1.weight": [f"{_LAYER}mlp.gate_up_proj.weight"]
    }


class Gemma3Weights(Qwen2Bridge):
    """The text model; mbridge has it inside the multimodal one."""

    _ATTENTION_MAPPING = _attention_with_norm("post_attention_layernorm")
    _MLP_MAPPING = _mlp_with_norms("pre_feedforward_layernorm", "post_feedforward_layernorm")


class GptOssWeights(LLMBridge):
    """Experts transposed, with gate and up in turns; not in mbridge."""

    _ATTENTION_MAPPING = LLMBridge._ATTENTION_MAPPING | {
        "self_attention.linear_proj.bias": [f"{_LAYER}self_attn.o_proj.bias"],
        "self_attention.core_attention.softmax_offset": [f"{_LAYER}self_attn.sinks"],
    }
    _MLP_MAPPING: ClassVar = {
        "pre_mlp_layernorm.weight": [f"{_LAYER}post_attention_layernorm.weight"],
        "mlp.router.weight": [f"{_LAYER}mlp.router.weight"],
        "mlp.router.bias": [f"{_LAYER}mlp.router.bias"],
    }
    _EXPERT = re.compile(
        r"decoder\.layers\.(\d+)\.mlp\.experts\.linear_(fc[12])\.(weight|bias)(\d+)$"
    )
    _PARTS: ClassVar = {"fc1": "gate_up_proj", "fc2": "down_proj"}

    def _weight_name_mapping_mlp(self, name: str) -> list[str]:
        match = self._EXPERT.match(name)
        if match is None:
            return super()._weight_name_mapping_mlp(name)
        layer, linear, kind, expert = match.groups()
        part = self._PARTS[linear] + ("_bias" if kind == "bias" else "")
        return [f"model.layers.{layer}.mlp.experts.{expert}.{part}"]

    def _weight_to_mcore_format(self, name: str, hf_weights: list[Tensor]) -> Tensor:
        """[hidden, 2 * ffn] of gate, up, gate, ... -> [2 * ffn, hidden], gates above ups."""
        match = self._EXPERT.match(name)
        if match is None:
            return super()._weight_to_mcore_format(name, hf_weights)
        weight = hf_weights[0].to(self.dtype).t() if match.group(3) == "weight" else hf_weights[0]
        if match.group(2) == "fc1":
            weight = torch.cat([weight[0::2], weight[1::2]])
        return weight.contiguous()

    def _weight_to_hf_format(self, name: str, weight: Tensor) -> tuple[list[str], list[Tensor]]:
        """The inverse of `_weight_to_mcore_format`."""
        match = self._EXPERT.match(name)
        if match is None:
            return super()._weight_to_hf_format(name, weight)
        if match.group(2) == "fc1":
            weight = torch.stack(weight.chunk(2), dim=1).flatten(0, 1)
        weight = weight.t() if match.group(3) == "weight" else weight
        return self._weight_name_mapping_mlp(name), [weight.contiguous()]
