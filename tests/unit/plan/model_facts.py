"""Shapes of public models, as their config.json on the Hugging Face hub gives them: facts for test cases."""

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
}


def parameters_by_hand(model: dict[str, Any]) -> int:
    """Embedding, head, and per layer attention, MLP or experts with their router, and norms."""
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
