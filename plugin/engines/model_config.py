"""The config of a model as inference engines want to read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def with_architecture(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the name of its causal language model class; engines take a model without
    one for an encoder.
    """
    config = dict(hf_config)
    if not config.get("architectures"):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]
    return config
