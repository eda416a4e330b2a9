"""What a resumed job finds in its run directory: steps, settings, and checkpoints to go back to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plugin.config import JobConfig
from plugin.config.flags import read_yaml
from plugin.errors import ConfigError
from plugin.megatron_backend.checkpoint.directory import complete_checkpoints, resolve, step_of
from plugin.observe.run_files import plain_settings, without_slices
from plugin.observe.run_record import read_run

#: Settings that a resumed run may change without training differently.
_HARMLESS = {
    *("resume", "resume_from", "overwrite", "run_dir", "address", "num_rollouts", "name"),
    *("save_interval", "save_at_end", "keep_checkpoints", "save_hf", "dump_log_probs"),
    *("start_timeout", "step_timeout", "rollout_timeout", "max_restarts", "network_interface"),
    *("use_wandb", "wandb_project"),
    *("rollout_url", "rollout_weights_dir", "rollout_request_timeout", "rollout_request_retries"),
    *("rollout_api_key_env", "threads_per_rank"),
}


def earlier_steps(run_dir: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The steps that a run directory already has, none if it is new; and what was not readable."""
    if not (run_dir / "metrics.jsonl").exists():
        return [], []
    record = read_run(run_dir)
    return [without_slices(step) for step in record.steps], record.problems


def earlier_settings(run_dir: Path) -> dict[str, Any]:
    """The settings of the run so far; none if the directory is new."""
    file = run_dir / "config.yaml"
    if not file.exists():
        return {}
    try:
        return read_yaml(file, "--run-dir")
    except ConfigError as error:
        raise ConfigError(
            f"{error}; repair it, or delete it to go on without comparing settings"
        ) from error


def changed_settings(run_dir: Path, config: JobConfig) -> Iterator[str]:
    """Settings that differ from those of the run so far and change what is trained."""
    before, now = earlier_settings(run_dir), plain_settings(config.as_dict())
    for name in sorted(set(before) & set(now) - _HARMLESS):
        if before[name] != now[name]:
            yield f"--{name.replace('_', '-')} was {before[name]}, is {now[name]}"


def find_checkpoint(root: Path, name: str | None, option: str = "--resume-from") -> Path | None:
    """The checkpoint that `option` names, or the latest; None if there is none yet."""
    complete = complete_checkpoints(root)
    if name is None:
        return resolve(root) if complete else None
    for path in complete:
        if name.removeprefix("step_").lstrip("0") == str(step_of(path)):
            return path
    there = ", ".join(path.name for path in complete) or "none"
    raise ConfigError(
        f"{option} {name}: {root} holds no such checkpoint; complete ones there: {there}"
    )


class RunCheckpoints:
    """The checkpoints that a run may go back to: those it wrote, and those it resumed from."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._steps: set[int] = set()

    def add(self, step: int) -> None:
        """Count the checkpoint of `step` in; before it is saved, for the save may be cut off."""
        self._steps.add(step)

    def add_until(self, last: Path) -> None:
        """Count in `last`, which the run resumes from, and those before it."""
        self._steps |= {
            s for s in map(step_of, complete_checkpoints(last.parent)) if s <= step_of(last)
        }

    def newest(self) -> Path | None:
        """The newest complete one."""
        own = [path for path in complete_checkpoints(self.root) if step_of(path) in self._steps]
        return own[-1] if own else None
