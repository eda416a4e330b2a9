"""The engine that a configuration names: built in, or the user's own by import path; what it is
started with is checked before.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plugin.config import JobConfig
from plugin.config.engines import ENGINES, check_names
from plugin.config.import_paths import load_function
from plugin.engines.protocol import RolloutEngine, SamplingParameters
from plugin.errors import ConfigError

#: Of each engine, the file and the dataclass whose fields are its arguments.
_SOURCES = {
    "vllm": ("engine/arg_utils.py", "EngineArgs"),
    "sglang": ("srt/server_args.py", "ServerArgs"),
}

#: Of keys and values of vLLM on CPU, in bytes.
_SMALLEST_CACHE, _LARGEST_CACHE = 64 << 20, 4 << 30


def make_engine(config: JobConfig, hf_config: Mapping[str, Any], name: str) -> RolloutEngine:
    """Build the engine in this process; its weights come with `load_weights`.

    hf_config: the policy's Hugging Face configuration; name: for messages and health
    """
    return load_function(config.engine_traits.factory)(config, hf_config, name)


def sampling_parameters(config: JobConfig, stop_token_ids: tuple[int, ...]) -> SamplingParameters:
    """How the engines sample; log-probs are turned on with a warning if a feature needs them."""
    log_probs = config.return_rollout_log_probs
    needing = config.needs_rollout_log_probs()
    if needing and not log_probs:
        warnings.warn(
            f"{', '.join(needing)} needs the engine's log-probs, so they are turned on although "
            "--no-return-rollout-log-probs was given",
            stacklevel=2,
        )
        log_probs = True
    return SamplingParameters(
        temperature=config.rollout_temperature,
        top_p=config.rollout_top_p,
        top_k=config.rollout_top_k,
        min_p=config.rollout_min_p,
        max_response_length=config.max_response_length,
        stop_token_ids=stop_token_ids,
        log_probs=log_probs,
        routed_experts=config.wants_rollout_routes,
        sampling_mask=config.replays_sampling_mask,
        routed_weights=config.wants_route_weights,
        head=config.score_centering_topk,
        drop_bad_log_probs=config.bad_log_probs == "drop",
    )


def api_key(config: JobConfig) -> str | None:
    """The servers' key in this process's environment; None where the job names no variable."""
    return key_in_environment("--rollout-api-key-env", config.rollout_api_key_env)


def key_in_environment(option: str, name: str | None) -> str | None:
    """The key in the environment variable `name`, which `option` gives; None without a name."""
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(
            f"{option} names {name}, which holds no key; export {name}=... before the job starts"
        )
    return key


def check_engine_model(config: JobConfig, hf_config: Mapping[str, Any]) -> None:
    """Refuse a model that the engine cannot generate with, or report from as asked."""
    topk, vocabulary = config.score_centering_topk, hf_config["vocab_size"]
    if topk > vocabulary:
        raise ConfigError(
            f"--score-centering-topk is {topk}, and the model has {vocabulary} ids; lower it"
        )
    linear = "linear_attention" in (hf_config.get("layer_types") or ())
    if linear and not config.engine_traits.linear_attention:
        others = [name for name, traits in ENGINES.items() if traits.linear_attention]
        raise ConfigError(
            f"--rollout-engine {config.rollout_engine} cannot generate with "
            f"{hf_config['model_type']}: the state of its linear attention has no place in this "
            f"engine's cache; use {', '.join(others)}"
        )


def check_engine_size(config: JobConfig, hf_config: Mapping[str, Any]) -> None:
    """Refuse a tensor parallel size that does not divide the heads of the model."""
    size = config.rollout_num_gpus_per_engine
    if size == 1 or not config.engine_traits.tensor_parallel:
        return
    heads = int(hf_config["num_attention_heads"])
    groups = int(hf_config.get("num_key_value_heads") or heads)
    fits = [
        n for n in range(1, heads + 1) if heads % n == 0 and (groups % n == 0 or n % groups == 0)
    ]
    if size not in fits:
        raise ConfigError(
            f"--rollout-num-gpus-per-engine is {size}; the model has {heads} attention heads and "
            f"{groups} of keys and values, which can be shared by {', '.join(map(str, fits))}"
        )


def check_engine(config: JobConfig) -> None:
    """Refuse an engine without its API key, with arguments that it does not know, or whose package
    is missing on this machine.

    Another cluster may have the package.
    """
    api_key(config)
    for package, names in (
        ("vllm", config.vllm_arguments()),
        ("sglang", config.sglang_arguments()),
    ):
        known = installed_arguments(package) if names else None
        if known is not None:
            check_names(f"--{package}-args", names, known)
    if config.engine_traits.package is None or config.address is not None:
        return
    package, install = config.engine_traits.package
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ConfigError(
            f"--rollout-engine {config.rollout_engine}: {package} is not installed; {install}"
        )


def installed_arguments(package: str) -> set[str] | None:
    """Names of the arguments that the installed `package` takes; None where they cannot be read.

    Read from its source: an import would be slow.
    """
    file, name = _SOURCES[package]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    try:
        module = ast.parse((Path(spec.origin).parent / file).read_text())
    except (OSError, SyntaxError):
        return None
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            fields = {
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign)
                and isinstance(item.target, ast.Name)
                and "ClassVar" not in ast.unparse(item.annotation)
            }
            return fields or None
    return None


def with_architecture(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the name of its causal language model class; engines take a model without
    one for an encoder.
    """
    config = dict(hf_config)
    if not config.get("architectures"):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]
    return config


def head_size(hf_config: Mapping[str, Any]) -> int:
    """Channels of an attention head."""
    heads = int(hf_config["num_attention_heads"])
    return int(hf_config.get("head_dim") or int(hf_config["hidden_size"]) // heads)


def bytes_per_position(hf_config: Mapping[str, Any], dtype: str) -> int:
    """Of the keys and values of one token in all layers."""
    heads = int(hf_config.get("num_key_value_heads") or hf_config["num_attention_heads"])
    element = 4 if dtype == "float32" else 2
    return 2 * int(hf_config["num_hidden_layers"]) * heads * head_size(hf_config) * element


def cpu_cache_bytes(row: int, max_batch: int) -> int:
    """What vLLM on CPU is given for keys and values, where a whole response has `row` bytes."""
    return max(_SMALLEST_CACHE, 2 * row, min(row * max_batch, _LARGEST_CACHE))
