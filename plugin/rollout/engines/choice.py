"""The engine that a configuration names: built in, or the user's own by import path."""

from __future__ import annotations

import importlib.util
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


def check_engine(config: JobConfig) -> None:
    """Refuse an engine whose package is missing on this machine; another cluster may have it."""
    if config.engine_traits.package is None or config.address is not None:
        return
    package, install = config.engine_traits.package
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ConfigError(
            f"--rollout-engine {config.rollout_engine}: {package} is not installed; {install}"
        )
