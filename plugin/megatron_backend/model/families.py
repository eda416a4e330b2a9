"""The model families: how a Hugging Face config and its weights become Megatron's.

A family is a Hugging Face `model_type`. Adding one means adding an entry to `FAMILIES`; all other
code works from the entry. (`--embedded-model` lists those of which a tiny model can be built.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F

from plugin.errors import ConfigError

_NO_BIAS = "choose a model without these biases"
_REFUSED = (
    ("attention_bias", _NO_BIAS),
    ("mlp_bias", _NO_BIAS),
    (
        "use_sliding_window",
        "set it to false in config.json if the sequences are shorter than the window",
    ),
)

_LAYER = "model.layers.#."
#: The tensors of a checkpoint, with # for the numbers of layers and experts.
_DENSE_TENSORS = (
    *("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
    *(f"{_LAYER}{norm}_layernorm.weight" for norm in ("input", "post_attention")),
    *(f"{_LAYER}self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"{_LAYER}mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
)
_QWEN3_TENSORS = (*_DENSE_TENSORS, *(f"{_LAYER}self_attn.{part}_norm.weight" for part in "qk"))
_QWEN3_MOE_TENSORS = (
    *(*_QWEN3_TENSORS, f"{_LAYER}mlp.gate.weight"),
    *(f"{_LAYER}mlp.experts.#.{part}_proj.weight" for part in ("gate", "up", "down")),
)

_SHAPE_FIELDS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"),
    *("num_experts", "moe_intermediate_size", "mlp_only_layers", "decoder_sparse_step"),
)


@dataclass(frozen=True)
class ModelFamily:
    """What is particular to one family.

    architecture: the model class that config.json names; inference engines need it
    weights: import path of mbridge's tables of the names, fusions and tensor parallel cuts of the
        weights; a path, because the driver reads this table and mbridge imports all of Megatron
    transformer_arguments: from a Hugging Face config, the arguments of Megatron's
        `TransformerConfig` that the model decides; with `num_moe_experts` the model has routers
    refused: settings that must be off, because Megatron would silently compute something else, and
        what to do about each
    tensors: what a checkpoint holds, with # for numbers; anything else would be ignored. The
        parts of an MLP are in the dense layers alone, those of its experts in the others
    """

    architecture: str
    weights: str
    transformer_arguments: Callable[[Any], dict[str, Any]]
    refused: tuple[tuple[str, str], ...] = _REFUSED
    tensors: tuple[str, ...] = _DENSE_TENSORS

    def tensor_names(self, hf_config: Any) -> set[str]:
        """The tensors of a checkpoint that belongs to `hf_config`, by name."""
        arguments = self.transformer_arguments(hf_config)
        layers = range(arguments["num_layers"])
        experts = arguments.get("num_moe_experts", 0)
        routed = arguments.get("moe_layer_freq", [0] * len(layers))
        of_mlp = {"mlp.gate.": 1, "mlp.experts.": 1, "mlp.": 0}
        names = set()
        for pattern in self.tensors:
            kind = next((kind for part, kind in of_mlp.items() if part in pattern), None)
            for layer in layers if "#" in pattern else layers[:1]:
                if kind in (None, routed[layer]):
                    name = pattern.replace("#", str(layer), 1)
                    numbers = range(experts if "#" in name else 1)
                    names |= {name.replace("#", str(number)) for number in numbers}
        return names

    def misfits(self, hf_config: Any, names: Iterable[str]) -> tuple[list[str], list[str]]:
        """Those of `names` that the model has no place for, and those that it lacks.

        Old checkpoints hold `inv_freq`; some of a model with tied embeddings hold both of them.
        """
        found, known = set(names), self.tensor_names(hf_config)
        needed = known - {"lm_head.weight"} if hf_config.tie_word_embeddings else known
        unknown = {n for n in found - known if not n.endswith(".rotary_emb.inv_freq")}
        return sorted(unknown), sorted(needed - found)


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


def _qwen3_arguments(hf_config: Any) -> dict[str, Any]:
    return decoder_arguments(hf_config) | {"qk_layernorm": True}


def _qwen3_moe_arguments(hf_config: Any) -> dict[str, Any]:
    return _qwen3_arguments(hf_config) | {
        "num_moe_experts": hf_config.num_experts,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_router_topk": hf_config.num_experts_per_tok,
        # 1 where transformers builds an expert layer, 0 where it builds a dense one
        "moe_layer_freq": [
            int(i not in hf_config.mlp_only_layers and (i + 1) % hf_config.decoder_sparse_step == 0)
            for i in range(hf_config.num_hidden_layers)
        ],
        # softmax over the chosen logits = softmax over all of them, renormalized over the chosen
        "moe_router_pre_softmax": not hf_config.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
    }


FAMILIES: dict[str, ModelFamily] = {
    "llama": ModelFamily("LlamaForCausalLM", "mbridge.models.llama:LLaMABridge", decoder_arguments),
    "qwen3": ModelFamily(
        "Qwen3ForCausalLM",
        "mbridge.models.qwen3:Qwen3Bridge",
        _qwen3_arguments,
        tensors=_QWEN3_TENSORS,
    ),
    "qwen3_moe": ModelFamily(
        "Qwen3MoeForCausalLM",
        "plugin.megatron_backend.model.weight_tables:Qwen3MoEWeights",
        _qwen3_moe_arguments,
        tensors=_QWEN3_MOE_TENSORS,
    ),
}


def family_of(hf_config: Any) -> ModelFamily:
    """The family of a model; a `ConfigError` if Megatron would compute something else."""
    family = FAMILIES.get(hf_config.model_type)
    if family is None:
        raise ConfigError(
            f"model_type {hf_config.model_type!r} is not supported; "
            f"choose a model of {', '.join(FAMILIES)}"
        )
    if hf_config.hidden_act != "silu":
        raise ConfigError(
            f"hidden_act {hf_config.hidden_act!r} is not supported; only silu (SwiGLU) models are"
        )
    for setting, fix in family.refused:
        if getattr(hf_config, setting, False):
            raise ConfigError(f"{setting}=True is not supported; {fix}")
    return family


def rotary_arguments(hf_config: Any) -> dict[str, Any]:
    """`RotaryEmbedding`'s arguments; refuses scalings that Megatron computes differently."""
    parameters = dict(
        getattr(hf_config, "rope_parameters", None)
        or getattr(hf_config, "rope_scaling", None)
        or {}
    )
    theta = parameters.get("rope_theta", getattr(hf_config, "rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return {"rotary_base": theta}
    if kind == "linear":
        return {"rotary_base": theta, "seq_len_interpolation_factor": parameters["factor"]}
    if kind != "llama3":
        raise ConfigError(f"RoPE type {kind!r} is not supported; use default, linear or llama3")
    built_in = {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    given = {name: parameters[name] for name in built_in}
    if given != built_in:
        raise ConfigError(
            f"llama3 RoPE scaling with {given} is not supported: Megatron-Core fixes these to "
            f"{built_in}"
        )
    factor = parameters["factor"]
    return {"rotary_base": theta, "rope_scaling": True, "rope_scaling_factor": factor}


def model_shape(hf_config: Any) -> dict[str, Any]:
    """The numbers of a Hugging Face config that decide which checkpoints fit it."""
    return {name: getattr(hf_config, name) for name in _SHAPE_FIELDS if hasattr(hf_config, name)}
