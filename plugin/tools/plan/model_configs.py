"""The config.json of a model, read as transformers reads it; no weights are needed."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from plugin.errors import ConfigError

#: Sizes of a model, and the largest that is planned: every layer of the whole model is walked over.
_LARGEST = {
    "num_hidden_layers": 10_000,
    "max_position_embeddings": 1 << 31,
    **dict.fromkeys(
        (
            *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"),
            *("num_attention_heads", "num_key_value_heads", "head_dim"),
            *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
        ),
        1 << 24,
    ),
}


def read_hf_config(file: Path) -> Any:
    """transformers' object of a config.json; a `ConfigError` for anything that is not a model."""
    from plugin.megatron_backend.model.families import family_of

    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} is not a readable config.json ({error}); give that of a Hugging Face model"
        ) from error
    if not isinstance(settings, dict) or not isinstance(settings.get("model_type"), str):
        raise ConfigError(
            f"{file} has no model_type, so it is not the config.json of a Hugging Face model; "
            "give one"
        )
    for name, most in _LARGEST.items():
        value = settings.get(name)
        if isinstance(value, int) and not 1 <= value <= most:
            raise ConfigError(
                f"{file}: {name} is {value}, and a model has 1 to {most:,}; give the config.json "
                "of a Hugging Face model"
            )
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(**settings)
    except Exception as error:  # whatever transformers makes of wrong values
        reason = textwrap.shorten(str(error), 200, placeholder=" ...")
        raise ConfigError(
            f"{file} is not a config that transformers takes ({reason}); give one of a supported "
            "model"
        ) from error
    family_of(config)
    return config
