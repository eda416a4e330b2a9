"""The files of a checkpoint without its weights: config.json and the index of its tensors.

Checks that a layout covers a checkpoint: each tensor is read once, each parameter is filled.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from plugin.errors import ConfigError
from plugin.json_lines import read_settings


@dataclass
class Claims:
    """Which parameters read which tensor of the checkpoint, filled stage by stage.

    readers: tensor -> parameters by their names in the whole model; parameters: how many stages
        hold each
    """

    readers: dict[str, list[str]] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)

    def add(
        self, chunks: Sequence[Any], groups: Any, shapes: Mapping[str, Tensor] | None = None
    ) -> None:
        """Add one stage, with the experts of all its expert ranks."""
        from plugin.megatron_backend.hf_weights.loading import weight_sources

        for parameter, tensors in weight_sources(chunks, groups, shapes):
            self.parameters[parameter] = self.parameters.get(parameter, 0) + 1
            for tensor in tensors:
                self.readers.setdefault(tensor, []).append(parameter)

    def problems(self, hf_config: Any, names: Iterable[str] | None = None) -> list[str]:
        """One sentence per problem; names: of the checkpoint, or those its config implies."""
        from plugin.megatron_backend.hf_weights.files import numbered_experts
        from plugin.megatron_backend.model.families import family_of, is_extra_layer

        family = family_of(hf_config)
        held = set(family.tensor_names(hf_config) if names is None else names)
        unknown, _ = family.misfits(hf_config, held)
        held = {name for name in held if not is_extra_layer(name, hf_config)}
        if family.fused_experts:
            experts = family.transformer_arguments(hf_config)["num_moe_experts"]
            held = {one for name in held for one in numbered_experts(name, experts)}
        unread = {n for n in held - self.readers.keys() if not n.endswith(".rotary_emb.inv_freq")}
        if hf_config.tie_word_embeddings:
            unread.discard("lm_head.weight")
        found = [f"{name} is read by no rank" for name in sorted(unread | set(unknown))]
        for tensor, readers in sorted(self.readers.items()):
            if tensor not in held:
                found.append(f"{tensor}, which {readers[0]} is made of, is not in the checkpoint")
            elif len(readers) > 1 and not _tied(tensor, readers, hf_config):
                found.append(f"{tensor} is read by {len(readers)} places: {', '.join(readers)}")
        found += [
            f"{parameter} is held by {count} stages"
            for parameter, count in sorted(self.parameters.items())
            if count > 1
        ]
        return found


def _tied(tensor: str, readers: Sequence[str], hf_config: Any) -> bool:
    both = {"embedding.word_embeddings.weight", "output_layer.weight"}
    return bool(hf_config.tie_word_embeddings) and set(readers) == both and "embed" in tensor


def index_names(index: Path) -> set[str]:
    """The tensors that a `model.safetensors.index.json` lists."""
    try:
        table = json.loads(read_settings(index))["weight_map"]
        if not isinstance(table, dict) or not table:
            raise ValueError("its weight_map is empty")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--hf-index {index} is not a model.safetensors.index.json ({error!r}); give the "
            "checkpoint's own, which has a weight_map"
        ) from error
    # The scales of block-wise float8 belong to a weight of the same name.
    return {name for name in table if not name.endswith("_scale_inv")}


def require_coverage(claims: Claims, hf_config: Any, names: Iterable[str] | None) -> None:
    """Refuse a checkpoint with a tensor that would be ignored, or without one that is needed."""
    problems = claims.problems(hf_config, names)
    if problems:
        more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(
            f"the checkpoint and the layout do not belong together: {problems[0]}{more}; give "
            "the config.json and the index of one model"
        )


#: Sizes of a model, and the largest that is planned: every layer of the whole model is walked over.
_LARGEST = {
    "num_hidden_layers": 1_000,
    "max_position_embeddings": 1 << 31,
    **dict.fromkeys(
        (
            *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"),
            *("num_attention_heads", "num_key_value_heads", "head_dim"),
        ),
        1 << 24,
    ),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), 4_096
    ),
}


def read_hf_config(file: Path) -> Any:
    """transformers' object of a config.json; a `ConfigError` for anything that is not a model."""
    from plugin.megatron_backend.model.families import family_of

    try:
        settings = json.loads(read_settings(file))
    except (OSError, ValueError, RecursionError) as error:
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
