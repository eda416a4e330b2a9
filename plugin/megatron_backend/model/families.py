"""The model families: how a Hugging Face config and its weights become Megatron's.

A family is a Hugging Face `model_type`. Adding one means adding an entry to `FAMILIES`; all other
code works from the entry. (`--embedded-model` lists those that have a tiny built-in model.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from plugin.errors import ConfigError
from plugin.megatron_backend.hf_weights import checkpoint_names as names
from plugin.megatron_backend.model import family_arguments as arguments
from plugin.megatron_backend.model.family_arguments import decoder_arguments

__all__ = ["FAMILIES", "ModelFamily", "decoder_arguments", "family_of", "model_shape"]

_NO_BIAS = "choose a model without these biases"
_BIASES = (("attention_bias", _NO_BIAS), ("mlp_bias", _NO_BIAS))
_WINDOW = (
    "use_sliding_window",
    "set it to false in config.json if the sequences are shorter than the window",
)
_SOFT_CAP = "Megatron-Core has no cap on logits; choose a model without it"

_OWN_TABLES = "plugin.megatron_backend.hf_weights.tables"
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")

_SHAPE_FIELDS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"),
    *("num_experts", "moe_intermediate_size", "mlp_only_layers", "decoder_sparse_step"),
    *("n_routed_experts", "n_shared_experts", "first_k_dense_replace", "num_local_experts"),
    *("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "shared_expert_intermediate_size"),
)


@dataclass(frozen=True)
class ModelFamily:
    """What is particular to one family.

    architecture: the model class that config.json names; inference engines need it
    weights: import path of the tables of the names, fusions and tensor parallel cuts of the
        weights; mbridge's where it has the family. A path, because the driver reads this table and
        mbridge imports all of Megatron
    transformer_arguments: from a Hugging Face config, the arguments of Megatron's
        `TransformerConfig` that the model decides; with `num_moe_experts` the model has routers
    tensors: from a Hugging Face config, what a checkpoint holds (`checkpoint_names`); anything
        else would be ignored
    refused: settings that must be off, because Megatron would silently compute something else, and
        what to do about each
    activation: the setting that names the activation, and the only value that is computed
    post_norms: whether norms also follow attention and MLP
    scales_embeddings: whether embeddings are multiplied by the root of their width
    fused_experts: whether a checkpoint holds all experts of a layer in one tensor
    latent_norm_eps: epsilon of the norms of latent attention, where it is not `rms_norm_eps`
    note: its text in the table of families
    """

    architecture: str
    weights: str
    transformer_arguments: Callable[[Any], dict[str, Any]]
    tensors: Callable[[Any], tuple[str, ...]] = names.dense_tensors
    refused: tuple[tuple[str, str], ...] = _BIASES
    activation: tuple[str, str] = ("hidden_act", "silu")
    post_norms: bool = False
    scales_embeddings: bool = False
    fused_experts: bool = False
    latent_norm_eps: float | None = None
    note: str = ""

    def tensor_names(self, hf_config: Any) -> set[str]:
        """The tensors of a checkpoint that belongs to `hf_config`, by name."""
        found = self.transformer_arguments(hf_config)
        routed = found.get("moe_layer_freq", [0] * found["num_layers"])
        experts = found.get("num_moe_experts", 0)
        return names.expanded(self.tensors(hf_config), found["num_layers"], experts, routed)

    def misfits(self, hf_config: Any, found: Iterable[str]) -> tuple[list[str], list[str]]:
        """The names in `found` that the model does not have, and the names that it misses.

        Old checkpoints hold `inv_freq`; some of a model with tied embeddings hold both of them;
        layers for multi-token prediction, numbered after the others, are left out.
        """
        found, known = set(found), self.tensor_names(hf_config)
        needed = known - {"lm_head.weight"} if hf_config.tie_word_embeddings else known
        unknown = {
            name
            for name in found - known
            if not name.endswith(".rotary_emb.inv_freq") and not is_extra_layer(name, hf_config)
        }
        return sorted(unknown), sorted(needed - found)


def is_extra_layer(name: str, hf_config: Any) -> bool:
    """Whether a tensor belongs to a layer for multi-token prediction, which is not trained."""
    if name.startswith("mtp."):
        return True
    counts = (getattr(hf_config, f"num_{kind}_layers", 0) for kind in ("mtp", "nextn_predict"))
    extra = max(count or 0 for count in counts)
    match = _LAYER.match(name) if extra else None
    if match is None:
        return False
    layers = hf_config.num_hidden_layers
    return bool(layers <= int(match.group(1)) < layers + extra)


FAMILIES: dict[str, ModelFamily] = {
    "llama": ModelFamily(
        "LlamaForCausalLM",
        "mbridge.models.llama:LLaMABridge",
        decoder_arguments,
        note="Llama 2 and 3",
    ),
    "mistral": ModelFamily(
        "MistralForCausalLM", "mbridge.models.llama:LLaMABridge", arguments.windowed_arguments
    ),
    "qwen2": ModelFamily(
        "Qwen2ForCausalLM",
        "mbridge.models.qwen2:Qwen2Bridge",
        arguments.qwen2_arguments,
        names.qwen2_tensors,
        note="Qwen2 and Qwen2.5",
    ),
    "qwen3": ModelFamily(
        "Qwen3ForCausalLM",
        "mbridge.models.qwen3:Qwen3Bridge",
        arguments.qwen3_arguments,
        names.qwen3_tensors,
    ),
    "qwen3_moe": ModelFamily(
        "Qwen3MoeForCausalLM",
        f"{_OWN_TABLES}:Qwen3MoEWeights",
        arguments.qwen3_moe_arguments,
        names.qwen3_moe_tensors,
        refused=(*_BIASES, _WINDOW),
        note="Qwen3-MoE",
    ),
    "qwen3_next": ModelFamily(
        "Qwen3NextForCausalLM",
        f"{_OWN_TABLES}:Qwen3NextWeights",
        arguments.qwen3_next_arguments,
        names.qwen3_next_tensors,
        note="Qwen3-Next",
    ),
    "glm4": ModelFamily(
        "Glm4ForCausalLM",
        f"{_OWN_TABLES}:GLM4Weights",
        arguments.glm4_arguments,
        names.glm4_tensors,
        refused=(),
        post_norms=True,
        note="GLM-4-0414",
    ),
    "glm4_moe": ModelFamily(
        "Glm4MoeForCausalLM",
        f"{_OWN_TABLES}:GLM4MoEWeights",
        arguments.glm4_moe_arguments,
        names.glm4_moe_tensors,
        refused=(),
        note="GLM-4.5 and GLM-4.6",
    ),
    "deepseek_v3": ModelFamily(
        "DeepseekV3ForCausalLM",
        "mbridge.models.deepseek_v3:DeepseekV3Bridge",
        arguments.deepseek_v3_arguments,
        names.deepseek_v3_tensors,
        latent_norm_eps=1e-6,
        note="DeepSeek-V3 and R1, Moonlight",
    ),
    "gemma3_text": ModelFamily(
        "Gemma3ForCausalLM",
        f"{_OWN_TABLES}:Gemma3Weights",
        arguments.gemma3_arguments,
        names.gemma3_tensors,
        refused=(
            *_BIASES,
            ("attn_logit_softcapping", _SOFT_CAP),
            ("final_logit_softcapping", _SOFT_CAP),
            ("use_bidirectional_attention", "choose a causal model"),
        ),
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        post_norms=True,
        scales_embeddings=True,
        note="Gemma 3, text only",
    ),
    "gpt_oss": ModelFamily(
        "GptOssForCausalLM",
        f"{_OWN_TABLES}:GptOssWeights",
        arguments.gpt_oss_arguments,
        names.gpt_oss_tensors,
        refused=(),
        fused_experts=True,
        note="gpt-oss, not in MXFP4",
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
    setting, supported = family.activation
    if getattr(hf_config, setting) != supported:
        raise ConfigError(
            f"{setting} {getattr(hf_config, setting)!r} is not supported; only {supported} models "
            f"of {hf_config.model_type} are"
        )
    for setting, fix in family.refused:
        if getattr(hf_config, setting, False):
            raise ConfigError(f"{setting}={getattr(hf_config, setting)} is not supported; {fix}")
    return family


def model_shape(hf_config: Any) -> dict[str, Any]:
    """The numbers of a Hugging Face config that decide which checkpoints fit it."""
    return {name: getattr(hf_config, name) for name in _SHAPE_FIELDS if hasattr(hf_config, name)}
