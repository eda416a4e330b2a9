"""From a Hugging Face config to the arguments of Megatron's `TransformerConfig`, by family.

Each function returns what the model decides; what a run decides is added by the builder. Nothing
here imports Megatron or transformers: the driver calls these functions, too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plugin.errors import ConfigError
from plugin.megatron_backend.model.rope import SLIDING, rope_parameters

_ROUTER = {
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_dtype": "fp32",
}


def decoder_arguments(hf_config: Any) -> dict[str, Any]:
    """Arguments of a pre-norm decoder with RMSNorm, SwiGLU and grouped-query attention: Llama."""
    return {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "ffn_hidden_size": hf_config.intermediate_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": getattr(hf_config, "head_dim", None)
        or hf_config.hidden_size // hf_config.num_attention_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "init_method_std": hf_config.initializer_range,
    }


def window_arguments(hf_config: Any) -> dict[str, Any]:
    """Which layers see only the last `sliding_window` tokens, themselves included; {} if none do.

    Example: a window of 8 on the first of two layers is ((7, 0), [1, 0]). Without `layer_types`
    (Mistral) every layer has the window.
    """
    window = getattr(hf_config, "sliding_window", None)
    types = getattr(hf_config, "layer_types", None) or [SLIDING] * hf_config.num_hidden_layers
    windowed = [int(kind == SLIDING) for kind in types]
    if not window or not any(windowed):
        return {}
    return {"window_size": (window - 1, 0), "window_attn_skip_freq": windowed}


def windowed_arguments(hf_config: Any) -> dict[str, Any]:
    """Llama with windows: Mistral."""
    return decoder_arguments(hf_config) | window_arguments(hf_config)


def qwen2_arguments(hf_config: Any) -> dict[str, Any]:
    """Biases on queries, keys and values."""
    return _qwen_dense(hf_config) | {"add_qkv_bias": True}


def qwen3_arguments(hf_config: Any) -> dict[str, Any]:
    """Norms on queries and keys."""
    return _qwen_dense(hf_config) | {"qk_layernorm": True}


def _qwen_dense(hf_config: Any) -> dict[str, Any]:
    windows = getattr(hf_config, "use_sliding_window", False)
    return decoder_arguments(hf_config) | (window_arguments(hf_config) if windows else {})


def qwen3_moe_arguments(hf_config: Any) -> dict[str, Any]:
    """Experts in the layers that `decoder_sparse_step` and `mlp_only_layers` leave."""
    return (
        decoder_arguments(hf_config)
        | _ROUTER
        | {
            "qk_layernorm": True,
            "num_moe_experts": hf_config.num_experts,
            "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
            "moe_router_topk": hf_config.num_experts_per_tok,
            # 1 where transformers builds an expert layer, 0 where it builds a dense one
            "moe_layer_freq": [
                int(
                    i not in hf_config.mlp_only_layers
                    and (i + 1) % hf_config.decoder_sparse_step == 0
                )
                for i in range(hf_config.num_hidden_layers)
            ],
            # softmax over the chosen logits = softmax over all of them, renormalized over them
            "moe_router_pre_softmax": not hf_config.norm_topk_prob,
        }
    )


def qwen3_next_arguments(hf_config: Any) -> dict[str, Any]:
    """Gated delta rule in most layers, gated attention in the others, a gated shared expert."""
    return qwen3_moe_arguments(hf_config) | {
        "layernorm_zero_centered_gamma": True,
        "attention_output_gate": True,
        "moe_shared_expert_intermediate_size": hf_config.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
        # 1 where a layer has the rule, 0 where it has attention
        "linear_attention_freq": [
            int(kind == "linear_attention") for kind in hf_config.layer_types
        ],
        **{
            name: getattr(hf_config, name)
            for name in (
                *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
                *("linear_num_key_heads", "linear_num_value_heads"),
            )
        },
    }


def sigmoid_router_arguments(hf_config: Any) -> dict[str, Any]:
    """Routers of DeepSeek-V3 and GLM-4-MoE.

    Sigmoid scores, chosen with a bias per expert inside the best groups of experts, normalized and
    scaled; shared experts beside them; the first layers dense. The bias is not trained: an RL run
    keeps the balance that pretraining left.
    """
    experts, topk = hf_config.n_routed_experts, hf_config.num_experts_per_tok
    groups, kept_groups = hf_config.n_group or 1, hf_config.topk_group or 1
    if not hf_config.norm_topk_prob:
        raise ConfigError(
            "norm_topk_prob=False is not supported with sigmoid scores: Megatron-Core always "
            "normalizes them; choose a model with norm_topk_prob=true"
        )
    # transformers ranks groups by their two best experts, Megatron by topk / topk_group of them
    if groups > 1 and topk // kept_groups != 2:
        raise ConfigError(
            f"num_experts_per_tok {topk} with topk_group {kept_groups} is not supported: "
            "Megatron-Core ranks groups by as many experts as it takes from each, the model by "
            "two; choose a model that takes two of each group"
        )
    dense = min(hf_config.first_k_dense_replace, hf_config.num_hidden_layers)
    return _ROUTER | {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": hf_config.moe_intermediate_size
        * hf_config.n_shared_experts,
        "moe_router_topk": topk,
        "moe_layer_freq": [0] * dense + [1] * (hf_config.num_hidden_layers - dense),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": hf_config.routed_scaling_factor,
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": kept_groups if groups > 1 else None,
    }


def glm4_arguments(hf_config: Any) -> dict[str, Any]:
    """RoPE over neighboring channels of half of each head, norms also after attention and MLP."""
    return decoder_arguments(hf_config) | {
        "add_qkv_bias": hf_config.attention_bias,
        "rotary_interleaved": True,
    }


def glm4_moe_arguments(hf_config: Any) -> dict[str, Any]:
    """Grouped-query attention, optionally with biases and norms on queries and keys."""
    return (
        decoder_arguments(hf_config)
        | sigmoid_router_arguments(hf_config)
        | {"add_qkv_bias": hf_config.attention_bias, "qk_layernorm": hf_config.use_qk_norm}
    )


def deepseek_v3_arguments(hf_config: Any) -> dict[str, Any]:
    """Multi-head latent attention: queries, keys and values come from low-rank latents."""
    if not getattr(hf_config, "rope_interleave", True):
        raise ConfigError(
            "rope_interleave=False is not supported: Megatron-Core's latent attention turns "
            "neighboring channels; choose a model with rope_interleave=true"
        )
    return (
        decoder_arguments(hf_config)
        | sigmoid_router_arguments(hf_config)
        | _latent_rope_arguments(hf_config)
        | {
            "multi_latent_attention": True,
            # the norms of the latents
            "qk_layernorm": True,
            "num_query_groups": hf_config.num_attention_heads,
            "kv_channels": hf_config.qk_nope_head_dim + hf_config.qk_rope_head_dim,
            "q_lora_rank": hf_config.q_lora_rank,
            "kv_lora_rank": hf_config.kv_lora_rank,
            "qk_head_dim": hf_config.qk_nope_head_dim,
            "qk_pos_emb_head_dim": hf_config.qk_rope_head_dim,
            "v_head_dim": hf_config.v_head_dim,
        }
    )


def _latent_rope_arguments(hf_config: Any) -> dict[str, Any]:
    """RoPE inside latent attention, which Megatron builds itself, default or YaRN."""
    found = rope_parameters(hf_config)
    if found["rope_type"] == "default":
        # Megatron scales the softmax by this factor for every kind of RoPE.
        return {
            "rope_type": "rope",
            "rotary_base": found["rope_theta"],
            "rotary_scaling_factor": 1.0,
        }
    scales = found.get("mscale"), found.get("mscale_all_dim")
    unsupported = [
        *(name for name in ("attention_factor",) if found.get(name) is not None),
        *(name for name in ("truncate",) if found.get(name) is False),
    ]
    if found["rope_type"] != "yarn" or unsupported or any(scales) != all(scales):
        raise ConfigError(
            f"RoPE {found} is not supported in latent attention: Megatron-Core has the default "
            "and YaRN with both or neither of mscale and mscale_all_dim; choose such a model"
        )
    return {
        "rope_type": "yarn",
        "rotary_base": found["rope_theta"],
        "rotary_scaling_factor": found["factor"],
        "original_max_position_embeddings": found["original_max_position_embeddings"],
        "beta_fast": found.get("beta_fast") or 32,
        "beta_slow": found.get("beta_slow") or 1,
        "mscale": scales[0] or 1.0,
        "mscale_all_dim": scales[1] or 0.0,
    }


def gemma3_arguments(hf_config: Any) -> dict[str, Any]:
    """Norms that multiply by 1 + weight, also after attention and MLP; GELU; windows."""
    return (
        decoder_arguments(hf_config)
        | window_arguments(hf_config)
        | {
            "activation_func": partial(F.gelu, approximate="tanh"),
            "layernorm_zero_centered_gamma": True,
            "qk_layernorm": True,
            "softmax_scale": hf_config.query_pre_attn_scalar**-0.5,
        }
    )


def gpt_oss_arguments(hf_config: Any) -> dict[str, Any]:
    """Biases everywhere, attention sinks, windows, experts with a clamped gate in every layer."""
    return (
        decoder_arguments(hf_config)
        | window_arguments(hf_config)
        | _ROUTER
        | {
            "add_bias_linear": True,
            "softmax_type": "learnable",
            "activation_func": partial(_sigmoid_gate, hf_config.swiglu_alpha),
            "activation_func_clamp_value": hf_config.swiglu_limit,
            "glu_linear_offset": 1.0,
            "num_moe_experts": hf_config.num_local_experts,
            "moe_ffn_hidden_size": hf_config.intermediate_size,
            "moe_router_topk": hf_config.num_experts_per_tok,
            "moe_layer_freq": [1] * hf_config.num_hidden_layers,
            "moe_router_pre_softmax": False,
        }
    )


def _sigmoid_gate(alpha: float, x: Tensor) -> Tensor:
    return x * torch.sigmoid(alpha * x)
