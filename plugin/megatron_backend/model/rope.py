"""RoPE as a Hugging Face config describes it: which kinds are supported, and their frequencies.

The scalings themselves are transformers' own functions, so that Megatron turns queries and keys by
the same angles as the model that was pretrained; Megatron-Core knows some of them with fixed
constants only. Kinds whose frequencies change with the length of the sequence (dynamic, longrope)
are refused: an engine and a trainer that pack differently would then disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from plugin.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("default", "linear", "llama3", "yarn")

#: The kinds of layers; each may have its own RoPE.
FULL, SLIDING = "full_attention", "sliding_attention"


def rope_parameters(hf_config: Any, layer_type: str = FULL) -> dict[str, Any]:
    """The settings of a layer's RoPE, `rope_type`, `rope_theta` and `partial_rotary_factor` given.

    transformers 4 spreads them over `rope_theta`, `rope_scaling` and `partial_rotary_factor`.
    """
    given = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None)
    found = dict(given or {})
    if has_rope_per_layer_type(hf_config):
        found = dict(found[layer_type])
    share = getattr(hf_config, "partial_rotary_factor", None) or 1.0
    theta = getattr(hf_config, "rope_theta", None) or 10000.0
    return found | {
        "rope_type": found.get("rope_type", found.get("type", "default")),
        "rope_theta": found.get("rope_theta", theta),
        "partial_rotary_factor": found.get("partial_rotary_factor", share),
    }


def has_rope_per_layer_type(hf_config: Any) -> bool:
    """Whether layers with a window turn by other angles than those without (Gemma 3)."""
    given = getattr(hf_config, "rope_parameters", None)
    return isinstance(given, Mapping) and FULL in given


def check_rope(hf_config: Any) -> None:
    """Refuse a RoPE that the trainer does not compute; needs neither torch nor transformers."""
    for layer_type in (FULL, SLIDING):
        kind = rope_parameters(hf_config, layer_type)["rope_type"]
        if kind not in KINDS:
            raise ConfigError(
                f"RoPE type {kind!r} is not supported; use a model with {', '.join(KINDS)}"
            )
    factors = {rope_factor(hf_config, layer_type) for layer_type in (FULL, SLIDING)}
    if len(factors) > 1:
        raise ConfigError(
            f"RoPE with attention factors {sorted(factors)} by kind of layer is not supported; "
            "one factor holds for all layers"
        )


def rope_factor(hf_config: Any, layer_type: str = FULL) -> float:
    """What cosine and sine are multiplied with: 1, except for YaRN."""
    import math

    found = rope_parameters(hf_config, layer_type)
    if found["rope_type"] != "yarn":
        return 1.0
    if found.get("attention_factor") is not None:
        return float(found["attention_factor"])
    factor = found.get("factor") or (
        hf_config.max_position_embeddings / found["original_max_position_embeddings"]
    )
    by, divided_by = found.get("mscale"), found.get("mscale_all_dim")
    if factor <= 1.0:
        return 1.0
    if by and divided_by:
        return (0.1 * by * math.log(factor) + 1.0) / (0.1 * divided_by * math.log(factor) + 1.0)
    return 0.1 * math.log(factor) + 1.0


def inverse_frequencies(hf_config: Any, width: int, layer_type: str = FULL) -> Tensor:
    """[rotated / 2] float32: radians per position of each pair of channels.

    hf_config: transformers' object
    width: channels of a head, of which `partial_rotary_factor` are rotated
    """
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    found = rope_parameters(hf_config, layer_type)
    if found["rope_type"] == "default":
        rotated = int(width * found["partial_rotary_factor"])
        exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
        return 1.0 / found["rope_theta"] ** exponents
    by_type = {"layer_type": layer_type} if has_rope_per_layer_type(hf_config) else {}
    frequencies, _ = ROPE_INIT_FUNCTIONS[found["rope_type"]](hf_config, "cpu", **by_type)
    return frequencies
