"""The tensors that a Hugging Face checkpoint of each family holds, by name.

Patterns have # for the numbers of layers and experts. The parts of an MLP are in the dense layers
alone, those of its experts and routers in the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_LAYER = "model.layers.#."
_ATTENTION = f"{_LAYER}self_attn."
_MLP = f"{_LAYER}mlp."
_GATED = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
_EDGES = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
#: 1: in layers with experts, 0: in dense layers; the first part that a pattern holds decides.
_OF_MLP = {
    **dict.fromkeys(("mlp.gate.", "mlp.experts.", "mlp.shared_experts.", "mlp.router."), 1),
    **dict.fromkeys(("mlp.shared_expert.", "mlp.shared_expert_gate."), 1),
    "mlp.": 0,
}


def _norms(*names: str) -> tuple[str, ...]:
    return tuple(f"{_LAYER}{name}_layernorm.weight" for name in names)


def _attention(*names: str) -> tuple[str, ...]:
    return tuple(f"{_ATTENTION}{name}" for name in names)


_PROJECTIONS = _attention(*(f"{part}_proj.weight" for part in "qkvo"))
_QKV_BIASES = _attention(*(f"{part}_proj.bias" for part in "qkv"))
_QK_NORMS = _attention("q_norm.weight", "k_norm.weight")
_DENSE = (
    *_EDGES,
    *_norms("input", "post_attention"),
    *_PROJECTIONS,
    *(f"{_MLP}{part}" for part in _GATED),
)
_EXPERTS = (f"{_MLP}gate.weight", *(f"{_MLP}experts.#.{part}" for part in _GATED))
_BIASED_EXPERTS = (
    *_EXPERTS,
    f"{_MLP}gate.e_score_correction_bias",
    *(f"{_MLP}shared_experts.{part}" for part in _GATED),
)


def dense_tensors(hf_config: Any) -> tuple[str, ...]:
    """Llama, Mistral."""
    return _DENSE


def qwen2_tensors(hf_config: Any) -> tuple[str, ...]:
    """With biases."""
    return _DENSE + _QKV_BIASES


def qwen3_tensors(hf_config: Any) -> tuple[str, ...]:
    """With norms on queries and keys."""
    return _DENSE + _QK_NORMS


def qwen3_moe_tensors(hf_config: Any) -> tuple[str, ...]:
    """With experts."""
    return _DENSE + _QK_NORMS + _EXPERTS


def qwen3_next_tensors(hf_config: Any) -> tuple[str, ...]:
    """Two kinds of layers, and a shared expert with a gate."""
    linear = ("in_proj_qkvz.weight", "in_proj_ba.weight", "conv1d.weight", "dt_bias", "A_log")
    by_kind = {
        "full_attention": _PROJECTIONS + _QK_NORMS,
        "linear_attention": tuple(
            f"{_LAYER}linear_attn.{part}" for part in (*linear, "norm.weight", "out_proj.weight")
        ),
    }
    return (
        *(*_EDGES, *_norms("input", "post_attention"), *_EXPERTS),
        *(f"{_MLP}{place}{part}" for place in ("", "shared_expert.") for part in _GATED),
        f"{_MLP}shared_expert_gate.weight",
        *(
            pattern.replace("#", str(layer))
            for layer, kind in enumerate(hf_config.layer_types)
            for pattern in by_kind[kind]
        ),
    )


def glm4_tensors(hf_config: Any) -> tuple[str, ...]:
    """Gate and up projections in one tensor."""
    return (
        *(*_EDGES, *_PROJECTIONS),
        *_norms("input", "post_attention", "post_self_attn", "post_mlp"),
        *(f"{_MLP}gate_up_proj.weight", f"{_MLP}down_proj.weight"),
        *(_QKV_BIASES if hf_config.attention_bias else ()),
    )


def glm4_moe_tensors(hf_config: Any) -> tuple[str, ...]:
    """With a bias per expert and shared experts."""
    return (
        *(*_DENSE, *_BIASED_EXPERTS),
        *(_QKV_BIASES if hf_config.attention_bias else ()),
        *(_QK_NORMS if hf_config.use_qk_norm else ()),
    )


def deepseek_v3_tensors(hf_config: Any) -> tuple[str, ...]:
    """Latent attention; small models have no latent of the queries."""
    low_rank = ("q_a_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight")
    return (
        *(*_EDGES, *_norms("input", "post_attention"), *_BIASED_EXPERTS),
        *(f"{_MLP}{part}" for part in _GATED),
        *_attention(*(low_rank if hf_config.q_lora_rank else ("q_proj.weight",))),
        *_attention("kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight"),
        *_attention("kv_b_proj.weight", "o_proj.weight"),
    )


def gemma3_tensors(hf_config: Any) -> tuple[str, ...]:
    """Four norms per layer."""
    return _DENSE + _QK_NORMS + _norms("pre_feedforward", "post_feedforward")


def gpt_oss_tensors(hf_config: Any) -> tuple[str, ...]:
    """All experts of a layer in one tensor."""
    return (
        *(*_EDGES, *_norms("input", "post_attention"), *_PROJECTIONS, *_QKV_BIASES),
        *_attention("o_proj.bias", "sinks"),
        *(f"{_MLP}router.{kind}" for kind in ("weight", "bias")),
        *(
            f"{_MLP}experts.{part}_proj{kind}"
            for part in ("gate_up", "down")
            for kind in ("", "_bias")
        ),
    )


def expanded(
    patterns: Iterable[str], num_layers: int, num_experts: int, is_routed: list[int]
) -> set[str]:
    """The names that `patterns` stand for.

    is_routed: per layer, 1 where it has experts
    """
    names = set()
    for pattern in patterns:
        kind = next((kind for part, kind in _OF_MLP.items() if part in pattern), None)
        for layer in range(num_layers) if "#" in pattern else range(1):
            if kind in (None, is_routed[layer]):
                name = pattern.replace("#", str(layer), 1)
                numbers = range(num_experts if "#" in name else 1)
                names |= {name.replace("#", str(number)) for number in numbers}
    return names
