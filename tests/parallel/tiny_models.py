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


FAMILIES = {"qwen3": tiny_qwen3, "qwen3_moe": tiny_qwen3_moe, "llama": tiny_llama}
#: Every entry of the table of families.
ALL_FAMILIES = FAMILIES | {
    "qwen2": tiny_qwen2,
    "mistral": tiny_mistral,
}


def hf_model(config: Any, seed: int = 0) -> Any:
    """A transformers model in float32 and eval mode whose weights depend on `config` and `seed` only.

    Norm weights are drawn around 1 and biases around 0, so that one that was not loaded shows.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name:
                torch.nn.init.normal_(tensor, mean=1.0, std=0.2)
            elif "bias" in name:
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
