"""Shapes of public models, as their config.json on the Hugging Face hub gives them: facts for test cases.

Compared with independent public copies: the Megatron arguments of Qwen3-0.6B to 235B-A22B and DeepSeek-V3 in slime
(scripts/models/*.sh) and the Llama 3 and 3.1 classes of NVIDIA NeMo (`Llama3Config8B` to `Llama31Config405B`). Totals agree
with the sizes in the models' names, see `PUBLISHED_BILLIONS`.
"""

from __future__ import annotations

from typing import Any

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}
_QWEN3_MOE = _QWEN3 | {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_LLAMA3: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}


def _shape(layers: int, hidden: int, ffn: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        **more,
    }


_DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}
_TIED = {"tie_word_embeddings": True}
#: name -> (config, parameters in all, counted by hand from the shapes; see `parameters_by_hand`)
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _QWEN3 | _shape(28, 1024, 3072, 16) | _TIED,
    "Qwen3-1.7B": _QWEN3 | _shape(28, 2048, 6144, 16) | _TIED,
    "Qwen3-4B": _QWEN3 | _shape(36, 2560, 9728, 32) | _TIED,
    "Qwen3-8B": _QWEN3 | _shape(36, 4096, 12288, 32),
    "Qwen3-14B": _QWEN3 | _shape(40, 5120, 17408, 40),
    "Qwen3-32B": _QWEN3 | _shape(64, 5120, 25600, 64),
    "Qwen3-30B-A3B": _QWEN3_MOE | _shape(48, 2048, 6144, 32, moe_intermediate_size=768),
    "Qwen3-235B-A22B": _QWEN3_MOE | _shape(94, 4096, 12288, 64, moe_intermediate_size=1536),
    "Llama-3-8B": _LLAMA3 | _shape(32, 4096, 14336, 32),
    "Llama-3-70B": _LLAMA3 | _shape(80, 8192, 28672, 64),
    "Llama-3.1-405B": _LLAMA3 | _shape(126, 16384, 53248, 128),
    "DeepSeek-V3": _DEEPSEEK_V3,
}

#: Parameters in billions as the models' cards and reports state them; DeepSeek-V3 without its MTP layer.
PUBLISHED_BILLIONS = {
    "Qwen3-0.6B": 0.6,
    "Qwen3-1.7B": 1.7,
    "Qwen3-4B": 4.0,
    "Qwen3-8B": 8.2,
    "Qwen3-14B": 14.8,
    "Qwen3-32B": 32.8,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B": 235,
    "Llama-3-8B": 8.0,
    "Llama-3-70B": 70.6,
    "Llama-3.1-405B": 406,
    "DeepSeek-V3": 671,
}


def parameters_by_hand(model: dict[str, Any]) -> int:
    """Embedding, head, and per layer attention, MLP or experts with their router, and norms."""
    if model["model_type"] == "deepseek_v3":
        return _deepseek_by_hand(model)
    hidden, heads, groups = (
        model["hidden_size"],
        model["num_attention_heads"],
        model["num_key_value_heads"],
    )
    dim = model.get("head_dim", hidden // heads)
    attention = hidden * dim * (2 * heads + 2 * groups)
    if model["model_type"] != "llama":
        attention += 2 * dim  # norms of queries and keys
    mlp = 3 * hidden * model["intermediate_size"]
    if "num_experts" in model:
        mlp = model["num_experts"] * (3 * hidden * model["moe_intermediate_size"] + hidden)
    layers = model["num_hidden_layers"] * (attention + mlp + 2 * hidden)
    embeddings = model["vocab_size"] * hidden * (1 if model["tie_word_embeddings"] else 2)
    return layers + embeddings + hidden


def _deepseek_by_hand(model: dict[str, Any]) -> int:
    """Latent attention, three dense layers, then experts with a shared one and a bias per router."""
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    queries, keys = model["q_lora_rank"], model["kv_lora_rank"]
    plain, rotary, value = (model[f"{part}_head_dim"] for part in ("qk_nope", "qk_rope", "v"))
    attention = hidden * queries + queries + queries * heads * (plain + rotary)
    attention += hidden * (keys + rotary) + keys + keys * heads * (plain + value)
    attention += heads * value * hidden
    expert = 3 * hidden * model["moe_intermediate_size"]
    experts = model["n_routed_experts"]
    dense = model["first_k_dense_replace"]
    layers = model["num_hidden_layers"]
    total = layers * (attention + 2 * hidden) + dense * 3 * hidden * model["intermediate_size"]
    total += (layers - dense) * ((experts + 1) * expert + experts * hidden + experts)
    return total + 2 * model["vocab_size"] * hidden + hidden
