"""The engine that a configuration names: built in, or the user's own by import path."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from plugin.config import JobConfig
from plugin.config.import_paths import load_function
from plugin.errors import ConfigError
from plugin.rollout.engines.protocol import RolloutEngine


def make_engine(config: JobConfig, hf_config: Mapping[str, Any], name: str) -> RolloutEngine:
    """Build the engine in this process; its weights come with `load_weights`.

    hf_config: the policy's Hugging Face configuration; name: for messages and health
    """
    return load_function(config.engine_traits.factory)(config, hf_config, name)


def api_key(config: JobConfig) -> str | None:
    """The servers' key in this process's environment; None where the job names no variable."""
    name = config.rollout_api_key_env
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(
            f"--rollout-api-key-env names {name}, which holds no key; export {name}=... before the "
            "job starts"
        )
    return key


def check_engine(config: JobConfig) -> None:
    """Refuse an engine without its API key, or whose package is missing on this machine.

    Another cluster may have the package.
    """
    api_key(config)
    if config.engine_traits.package is None or config.address is not None:
        return
    package, install = config.engine_traits.package
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ConfigError(
            f"--rollout-engine {config.rollout_engine}: {package} is not installed; {install}"
        )
