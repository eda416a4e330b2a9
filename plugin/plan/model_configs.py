"""The config.json of a model, read as transformers reads it; no weights are needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from plugin.errors import ConfigError


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
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(**settings)
    except Exception as error:  # whatever transformers makes of wrong values
        raise ConfigError(
            f"{file} is not a config that transformers takes ({error}); give one of a supported "
            "model"
        ) from error
    family_of(config)
    return config
