"""Paths of a configuration as every process of a job can use them."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from plugin.config import JobConfig

_CODE = (
    *("task_path", "reward_function_path", "custom_tis_function_path"),
    *("policy_loss", "advantage_estimator", "rollout_engine", "custom_detector_path"),
)
_FILES = (
    *(
        "hf_checkpoint",
        "ref_hf_checkpoint",
        "teacher_hf_checkpoint",
        "critic_hf_checkpoint",
        "prompt_data",
    ),
    *("rollout_weights_dir", "dump_log_probs", "lora_path"),
)


def with_absolute_paths(config: JobConfig) -> JobConfig:
    """The same configuration with whole paths: actors have working directories of their own.

    Of code, `file.py:function` gets the whole path of the file; import paths stay as they are.
    """
    changes: dict[str, Any] = {}
    for name in _CODE:
        value = getattr(config, name)
        if value is not None:
            changes[name] = ",".join(_with_whole_file(part.strip()) for part in value.split(","))
    changes["reward"] = tuple(map(_with_whole_file, config.reward))
    for name in _FILES:
        value = getattr(config, name)
        if value is not None:
            changes[name] = os.path.abspath(value)
    changes["teachers"] = tuple(
        f"{spec.name}={os.path.abspath(os.path.expanduser(spec.directory))}"
        if spec.directory
        else given
        for given, spec in zip(config.teachers, config.teacher_specs, strict=False)
    )
    if config.eval_data:
        named = [
            (name, rows if isinstance(rows, int) else os.path.abspath(rows))
            for name, rows in config.eval_sets
        ]
        changes["eval_data"] = tuple(f"{name}:{rows}" for name, rows in named)
    return dataclasses.replace(config, **changes)


def _with_whole_file(path: str) -> str:
    """`file.py:function`, with whatever follows it, with the whole path of the file."""
    file, colon, rest = path.partition(".py:")
    return f"{os.path.abspath(file)}{colon}{rest}" if colon else path
