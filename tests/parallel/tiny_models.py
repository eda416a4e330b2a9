"""Tiny Hugging Face models: configs of the supported families and deterministic weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VOCAB_SIZE = 96


def _common(**overrides: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        # Large enough that logits differ clearly between tokens.
        "initializer_range": 0.1,
        **overrides,
    }


def tiny_qwen3(**overrides: Any) -> Any:
    """Qwen3 dense: grouped-query attention, norms on queries and keys."""
    from transformers import Qwen3Config

    return Qwen3Config(**_common(**overrides))


def tiny_llama(**overrides: Any) -> Any:
    """Llama."""
    from transformers import LlamaConfig

    return LlamaConfig(**_common(**overrides))


def tiny_qwen3_moe(**overrides: Any) -> Any:
    """Qwen3-MoE: 4 experts, 2 per token."""
    from transformers import Qwen3MoeConfig

    settings = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return Qwen3MoeConfig(**_common(**(settings | overrides)))


def tiny_qwen3_next(**overrides: Any) -> Any:
    """Qwen3-Next: three layers with the gated delta rule, one with gated attention, a shared expert."""
    from transformers import Qwen3NextConfig

    settings = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
        "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    }
    return Qwen3NextConfig(**_common(**(settings | overrides)))


def tiny_qwen2(**overrides: Any) -> Any:
    """Qwen2.5: biases on queries, keys and values; a window on the last two layers."""
    from transformers import Qwen2Config

    windows = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
    shape = _common(**(windows | overrides))
    del shape["head_dim"]
    return Qwen2Config(**shape)


def tiny_mistral(**overrides: Any) -> Any:
    """Mistral: a window on every layer."""
    from transformers import MistralConfig

    return MistralConfig(**_common(**({"sliding_window": 5} | overrides)))


def tiny_glm4(**overrides: Any) -> Any:
    """GLM-4: norms after attention and MLP, RoPE over neighboring channels of half of each head."""
    from transformers import Glm4Config

    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    return Glm4Config(**_common(**({"rope_parameters": rope, "pad_token_id": None} | overrides)))


_SIGMOID_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}


def tiny_glm4_moe(**overrides: Any) -> Any:
    """GLM-4-MoE: sigmoid scores with a bias, a shared expert, the first layer dense."""
    from transformers import Glm4MoeConfig

    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    attention = {"attention_bias": True, "use_qk_norm": True, "rope_parameters": rope}
    groups = {"n_group": 1, "topk_group": 1}
    return Glm4MoeConfig(**_common(**(_SIGMOID_EXPERTS | attention | groups | overrides)))


def tiny_deepseek_v3(**overrides: Any) -> Any:
    """DeepSeek-V3: latent attention, two of four groups of experts, YaRN that scales the softmax."""
    from transformers import DeepseekV3Config

    latent = {
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_key_value_heads": 4,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        # Not that of the latents, which is always 1e-6.
        "rms_norm_eps": 1e-3,
    }
    groups = {"n_group": 4, "topk_group": 2}
    shape = _common(**(_SIGMOID_EXPERTS | latent | groups | overrides))
    del shape["head_dim"]
    return DeepseekV3Config(**shape)


def tiny_moonlight(**overrides: Any) -> Any:
    """Moonlight: no latent of the queries, one group, default RoPE."""
    default = {"rope_type": "default", "rope_theta": 5e4}
    changes = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": default}
    return tiny_deepseek_v3(**(changes | overrides))


def tiny_gemma3(**overrides: Any) -> Any:
    """Gemma 3: two kinds of layers with a RoPE each, four norms per layer, tied embeddings."""
    from transformers import Gemma3TextConfig

    settings = {
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
        },
        "query_pre_attn_scalar": 8,
        "tie_word_embeddings": True,
        "pad_token_id": None,
    }
    return Gemma3TextConfig(**_common(**(settings | overrides)))


def tiny_gpt_oss(**overrides: Any) -> Any:
    """gpt-oss: sinks, windows on every other layer, biases, experts with a clamped gate, YaRN."""
    from transformers import GptOssConfig

    settings = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        # Low enough that the clamp does something.
        "swiglu_limit": 0.3,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 8,
        },
    }
    return GptOssConfig(**_common(**(settings | overrides)))


FAMILIES = {"qwen3": tiny_qwen3, "qwen3_moe": tiny_qwen3_moe, "llama": tiny_llama}
#: Every entry of the table of families.
ALL_FAMILIES = FAMILIES | {
    "qwen2": tiny_qwen2,
    "mistral": tiny_mistral,
    "qwen3_next": tiny_qwen3_next,
    "glm4": tiny_glm4,
    "glm4_moe": tiny_glm4_moe,
    "deepseek_v3": tiny_deepseek_v3,
    "gemma3_text": tiny_gemma3,
    "gpt_oss": tiny_gpt_oss,
}


def hf_model(config: Any, seed: int = 0) -> Any:
    """A transformers model in float32 and eval mode whose weights depend on `config` and `seed` only.

    Norm weights are drawn around 1 (Gemma's around 0) and biases around 0, so that one that was not
    loaded shows.
    """
    from transformers import AutoModelForCausalLM

    middle = 0.0 if config.model_type in ("gemma3_text", "qwen3_next") else 1.0
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name:
                plain = "linear_attn" in name  # the one norm of Qwen3-Next that is not around 0
                torch.nn.init.normal_(tensor, mean=1.0 if plain else middle, std=0.2)
            elif "bias" in name or "sinks" in name:
                torch.nn.init.normal_(tensor, std=0.2)
    return model.eval()


_state_dicts: dict[tuple[str, int], dict[str, Tensor]] = {}


def hf_state_dict(config: Any, seed: int = 0) -> dict[str, Tensor]:
    """The weights of `hf_model(config, seed)` by their names in a checkpoint on disk."""
    key = (config.to_json_string(use_diff=False), seed)
    if key not in _state_dicts:
        _state_dicts[key] = _saved_state_dict(config, seed)
    return dict(_state_dicts[key])


def _saved_state_dict(config: Any, seed: int) -> dict[str, Tensor]:
    import tempfile
    from pathlib import Path

    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as directory:
        hf_model(config, seed).save_pretrained(directory)
        state: dict[str, Tensor] = {}
        for file in Path(directory).glob("*.safetensors"):
            state |= load_file(file)
    return state


def hf_log_probs(model: Any, tokens: Tensor) -> Tensor:
    """[B, S-1] log-probs that `model` gives to each next token of `tokens` [B, S]."""
    with torch.no_grad():
        logits = model(tokens).logits[:, :-1].float()
    return torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
