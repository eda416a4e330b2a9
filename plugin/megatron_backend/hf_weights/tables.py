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
    """Adds the dense layers of `mlp_only_layers`."""

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


class Qwen3NextWeights(Qwen3MoEWeights):
    """Gated delta nets, gates beside queries, a gated shared expert; not in mbridge.

    Hugging Face has the parts of a delta net's input in turns by key head, Megatron one after the
    other; a tensor parallel rank has its share of each.
    """

    _ATTENTION_MAPPING = Qwen3MoEWeights._ATTENTION_MAPPING | {
        "self_attention.in_proj.weight": [
            f"{_LAYER}linear_attn.in_proj_qkvz.weight",
            f"{_LAYER}linear_attn.in_proj_ba.weight",
        ],
        "self_attention.conv1d.weight": [f"{_LAYER}linear_attn.conv1d.weight"],
        "self_attention.dt_bias": [f"{_LAYER}linear_attn.dt_bias"],
        "self_attention.A_log": [f"{_LAYER}linear_attn.A_log"],
        "self_attention.out_norm.weight": [f"{_LAYER}linear_attn.norm.weight"],
        "self_attention.out_proj.weight": [f"{_LAYER}linear_attn.out_proj.weight"],
    }

    def _sections(self, name: str) -> list[int] | None:
        """Rows of query, key, value and, of the input, gate, beta and alpha; None of others."""
        config = self.hf_config
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        if "self_attention.conv1d." in name:
            return [keys, keys, values]
        if "self_attention.in_proj.weight" in name:
            heads = config.linear_num_value_heads
            return [keys, keys, values, values, heads, heads]
        return None

    def _weight_split_across_tp(
        self, name: str, weight: Tensor, param: Tensor, tp_split_size: int
    ) -> list[Tensor]:
        sections = self._sections(name)
        if sections is None or tp_split_size == 1:
            return list(super()._weight_split_across_tp(name, weight, param, tp_split_size))
        parts = [part.chunk(tp_split_size) for part in weight.split(sections)]
        return [torch.cat(shares) for shares in zip(*parts, strict=True)]

    def _weight_merge_across_tp(self, name: str, weights: list[Tensor], param: Tensor) -> Tensor:
        sections = self._sections(name)
        if sections is None:
            return super()._weight_merge_across_tp(name, weights, param)
        shares = [weight.split([size // len(weights) for size in sections]) for weight in weights]
        return torch.cat([torch.cat(part) for part in zip(*shares, strict=True)])

    def _weight_to_mcore_format(self, name: str, hf_weights: list[Tensor]) -> Tensor:
        config = self.hf_config
        if "self_attention.in_proj.weight" in name:
            repeats = config.linear_num_value_heads // config.linear_num_key_heads
            values = repeats * config.linear_value_head_dim
            sizes = [config.linear_key_head_dim] * 2 + [values] * 2
            heads = config.linear_num_key_heads
            by_head = [weight.to(self.dtype).unflatten(0, (heads, -1)) for weight in hf_weights]
            parts = (*by_head[0].split(sizes, dim=1), *by_head[1].split(repeats, dim=1))
            return torch.cat([part.flatten(0, 1) for part in parts])
        if "self_attention.linear_qkv.weight" in name:
            query, key, value = (
                w.to(self.dtype).unflatten(0, (config.num_key_value_heads, -1)) for w in hf_weights
            )
            # [groups, heads, query above gate, width, hidden]
            pairs = query.unflatten(1, (-1, 2, config.head_dim))
            parts = (pairs[:, :, 0].flatten(1, 2), pairs[:, :, 1].flatten(1, 2), key, value)
            return torch.cat(parts, dim=1).flatten(0, 1)
        return super()._weight_to_mcore_format(name, hf_weights)

    def _weight_to_hf_format(self, name: str, weight: Tensor) -> tuple[list[str], list[Tensor]]:
        """The inverse of `_weight_to_mcore_format`."""
        config, names = self.hf_config, self._weight_name_mapping_mcore_to_hf(name)
        if "self_attention.in_proj.weight" in name:
            parts = [
                part.unflatten(0, (config.linear_num_key_heads, -1))
                for part in weight.split(self._sections(name))
            ]
            return names, [torch.cat(p, dim=1).flatten(0, 1) for p in (parts[:4], parts[4:])]
        if "self_attention.linear_qkv.weight" in name:
            width = config.head_dim
            queries = config.num_attention_heads // config.num_key_value_heads * width
            query, gate, key, value = weight.unflatten(0, (config.num_key_value_heads, -1)).split(
                [queries, queries, width, width], dim=1
            )
            pairs = torch.stack([part.unflatten(1, (-1, width)) for part in (query, gate)], dim=2)
            return names, [pairs.flatten(0, 3), key.flatten(0, 1), value.flatten(0, 1)]
        return super()._weight_to_hf_format(name, weight)
