"""One name for every parameter of a model, whatever layers and layout it is built with."""

from __future__ import annotations

import re
from typing import Any

_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$")
#: An expert's weight or bias in a canonical name; the third group is its number.
GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")
#: Norms that Transformer Engine has inside the linear layer that follows them.
_LATENT_NORMS = {
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
#: The layer that a parameter belongs to.
LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


def canonical_name(name: str, model: Any, first_expert: int) -> str:
    """A parameter's name in the whole model, in Transformer Engine's spelling.

    Layer numbers become global, and experts are counted from `first_expert`. The local spec's
    `layers.0.input_layernorm.weight` on the second of two 2-layer stages becomes
    `layers.2.self_attention.linear_qkv.layer_norm_weight`.
    """
    match = LAYER.match(name)
    if match is None:
        return name
    layer = model.decoder.layers[int(match.group(1))]
    rest, is_latent = name[match.end() :], model.config.multi_latent_attention
    if is_latent and rest in _LATENT_NORMS:
        rest = _LATENT_NORMS[rest]
    elif rest == "input_layernorm.weight" and not is_latent:
        rest = "self_attention.linear_qkv.layer_norm_weight"
    elif rest == "pre_mlp_layernorm.weight" and not hasattr(layer.mlp, "router"):
        rest = "mlp.linear_fc1.layer_norm_weight"
    elif expert := _LOCAL_EXPERT.match(rest):
        number = first_expert + int(expert.group(1))
        rest = f"mlp.experts.{expert.group(2)}.{expert.group(3)}{number}"
    elif expert := GROUPED_EXPERT.match(rest):
        number = first_expert + int(expert.group(3))
        rest = f"mlp.experts.{expert.group(1)}.{expert.group(2)}{number}"
    return f"decoder.layers.{layer.layer_number - 1}.{rest}"
