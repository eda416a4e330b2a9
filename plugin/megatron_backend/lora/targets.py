"""Which linear layers of a model get adapters; decided on the driver, without Megatron."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from plugin.config import TrainerConfig
from plugin.config.model import ALL_LINEAR, LORA_TARGETS
from plugin.errors import ConfigError
from plugin.json_lines import read_settings
from plugin.megatron_backend.hf_weights.files import open_weights
from plugin.megatron_backend.model.families import family_of

#: The files of a PEFT directory.
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: What PEFT puts before the name of a layer.
PEFT_PREFIX = "base_model.model."
#: The only values of a PEFT adapter's settings that are supported; missing ones are, too.
_PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "rank_pattern": None,
    "alpha_pattern": None,
    "layers_to_transform": None,
    "target_parameters": None,
}


def model_targets(hf_config: Any) -> tuple[str, ...]:
    """The names of `LORA_TARGETS` that a model has as linear layers of their own."""
    names = family_of(hf_config).tensor_names(hf_config)
    found = {name.split(".")[-2] for name in names if name.endswith(".weight")}
    return tuple(target for target in LORA_TARGETS if target in found)


def chosen_targets(hf_config: Any, config: TrainerConfig) -> tuple[str, ...]:
    """What --lora-target means for this model; a `ConfigError` if it has no such layer."""
    there, named = model_targets(hf_config), config.lora_targets
    if named == (ALL_LINEAR,):
        return there
    for name in named:
        if name not in there:
            raise ConfigError(
                f"--lora-target {config.lora_target}: {hf_config.model_type} has no linear layer "
                f"{name} of its own; it has {', '.join(there)}"
            )
    return tuple(target for target in there if target in named)


def check_lora(hf_config: Any, config: TrainerConfig) -> None:
    """Refuse adapters that the model or the layout of its experts does not support."""
    if not config.lora_rank:
        return
    if "linear_attention_freq" in family_of(hf_config).transformer_arguments(hf_config):
        raise ConfigError(
            f"--lora-rank {config.lora_rank} with {hf_config.model_type}: adapters support neither "
            "gates beside queries nor the gated delta rule; train all weights, or another model"
        )
    targets = chosen_targets(hf_config, config)
    cut, tensor = config.expert_tensor_parallel_size, config.tensor_model_parallel_size
    names = family_of(hf_config).tensor_names(hf_config)
    on_experts = any(
        ".experts." in name and name.endswith(f".{target}.weight")
        for name in names
        for target in targets
    )
    if on_experts and config.syncs_adapters:
        raise ConfigError(
            f"--lora-sync adapter: --lora-target {config.lora_target} has adapters on experts, "
            "which the engine holds in one tensor per layer; use --lora-sync merged, or leave "
            "the experts' layers out"
        )
    if on_experts and cut not in (1, tensor):
        raise ConfigError(
            f"--lora-target {config.lora_target} has adapters on experts that are cut over {cut} "
            f"ranks of {tensor} tensor parallel ones; use --expert-tensor-parallel-size 1 or "
            f"{tensor}, or leave the experts' layers out"
        )


def check_adapter_directory(hf_config: Any, config: TrainerConfig) -> None:
    """Refuse a --lora-path that is not a plain LoRA with this rank and scale on these layers."""
    if config.lora_path is None:
        return
    directory, option = Path(config.lora_path), f"--lora-path {config.lora_path}"
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (directory / name).is_file():
            raise ConfigError(f"{option} holds no {name}; give the directory of a PEFT adapter")
    try:
        found = json.loads(read_settings(directory / ADAPTER_CONFIG))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{option}: {ADAPTER_CONFIG} is not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{option}: {ADAPTER_CONFIG} is not an object")
    for setting, plain in _PLAIN.items():
        if (value := found.get(setting)) and value != plain:
            raise ConfigError(
                f"{option} has {setting} {value}; only {plain or 'adapters without it'} can be "
                "trained here"
            )
    for setting, flag, ours in (
        ("r", "--lora-rank", config.lora_rank),
        ("lora_alpha", "--lora-alpha", config.lora_alpha),
    ):
        if found.get(setting) != ours:
            raise ConfigError(
                f"{option} has {setting} {found.get(setting)} and {flag} is {ours}; set {flag} "
                f"{found.get(setting)}"
            )
    wanted = _adapter_names(hf_config, chosen_targets(hf_config, config))
    there = set(open_weights(directory / ADAPTER_WEIGHTS).keys())
    for problem, names in (("lacks", wanted - there), ("has", there - wanted)):
        if names:
            raise ConfigError(
                f"{option} {problem} {min(names)} ({len(names)} such tensors) and --lora-target "
                f"{config.lora_target} means other layers of the model; its adapter_config.json "
                f"names {found.get('target_modules')}, set --lora-target to these"
            )


def _adapter_names(hf_config: Any, targets: tuple[str, ...]) -> set[str]:
    """The tensors of a PEFT adapter with these targets."""
    layers = (
        name.removesuffix(".weight")
        for name in family_of(hf_config).tensor_names(hf_config)
        if name.endswith(".weight")
    )
    return {
        f"{PEFT_PREFIX}{layer}.lora_{half}.weight"
        for layer in layers
        if layer.rpartition(".")[2] in targets
        for half in "AB"
    }
