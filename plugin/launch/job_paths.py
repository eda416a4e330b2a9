"""Paths of a configuration as every process of a job can use them."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from plugin.config import JobConfig

_CODE = (
    *("task_path", "reward_function_path", "custom_tis_function_path"),
    "custom_detector_path",
)
_FILES = (
    *("hf_checkpoint", "ref_hf_checkpoint", "teacher_hf_checkpoint", "prompt_data"),
    "rollout_weights_dir",
)


def with_absolute_paths(config: JobConfig) -> JobConfig:
    """The same configuration with files named from the root: actors have working directories of their own."""
    changes: dict[str, Any] = {}
    for name in _CODE:
        value = getattr(config, name)
        if value is not None:
            changes[name] = ",".join(_absolute_code(part.strip()) for part in value.split(","))
    for name in _FILES:
        value = getattr(config, name)
        if value is not None:
            changes[name] = os.path.abspath(value)
    return dataclasses.replace(config, **changes) if changes else config


def _absolute_code(path: str) -> str:
    """`file.py:function` with the whole path of the file; import paths stay as they are."""
    file, colon, function = path.rpartition(":")
    return f"{os.path.abspath(file)}{colon}{function}" if file.endswith(".py") else path
