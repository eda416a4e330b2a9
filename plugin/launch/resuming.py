"""What a resumed job finds in its run directory: the steps so far, and changed settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from plugin.config import JobConfig
from plugin.observe.run_files import plain_settings, without_slices
from plugin.observe.run_record import read_run

#: Settings that a resumed run may change without training differently.
_HARMLESS = {
    *("resume", "run_dir", "address", "num_rollouts", "save_interval", "keep_checkpoints", "name"),
    *("start_timeout", "step_timeout", "rollout_timeout", "max_restarts", "save_hf", "use_wandb"),
    *("dump_log_probs", "network_interface", "wandb_project"),
    *("rollout_url", "rollout_weights_dir", "rollout_request_timeout", "rollout_request_retries"),
    "rollout_api_key_env",
}


def earlier_steps(run_dir: Path) -> list[dict[str, Any]]:
    """The steps that a run directory already has, none if it is new."""
    if not (run_dir / "metrics.jsonl").exists():
        return []
    return [without_slices(step) for step in read_run(run_dir).steps]


def changed_settings(run_dir: Path, config: JobConfig) -> Iterator[str]:
    """Settings that differ from those of the run so far and change what is trained."""
    file = run_dir / "config.yaml"
    if not file.exists():
        return
    before = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    now = plain_settings(config.as_dict())
    for name in sorted(set(before) & set(now) - _HARMLESS):
        if before[name] != now[name]:
            yield f"--{name.replace('_', '-')} was {before[name]}, is {now[name]}"
