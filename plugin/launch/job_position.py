"""How far a job has come, where its checkpoints are, and how often it may be restarted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from plugin.config import JobConfig
from plugin.errors import ParallelError
from plugin.megatron_backend.checkpoint.directory import complete_checkpoints
from plugin.observe.run_files import plain_settings, without_slices
from plugin.observe.run_record import read_run

#: Settings that a resumed run may change without training differently.
_HARMLESS = {
    *("resume", "run_dir", "address", "num_rollouts", "save_interval", "keep_checkpoints", "name"),
    *("start_timeout", "step_timeout", "rollout_timeout", "max_restarts", "save_hf", "use_wandb"),
    *("dump_log_probs", "network_interface", "wandb_project"),
    *("rollout_url", "rollout_weights_dir", "rollout_request_timeout", "rollout_request_retries"),
}


@dataclass(frozen=True)
class JobPosition:
    """Rollouts trained on, optimizer updates made, and the version of the trainer's weights."""

    rollouts: int = 0
    updates: int = 0
    version: int = 0

    def after_update(self) -> JobPosition:
        """One optimizer update further."""
        return replace(self, updates=self.updates + 1)

    def after_rollout(self) -> JobPosition:
        """One rollout further, with new weights."""
        return replace(self, rollouts=self.rollouts + 1, version=self.version + 1)

    def with_version_above(self, used: int) -> JobPosition:
        """The same place; a version that was used before is replaced by the next one that was not."""
        return replace(self, version=max(self.version, used + 1))

    def as_state(self, queue: dict[str, Any]) -> dict[str, Any]:
        """What the driver puts into a checkpoint. Prompts and seeds follow from numbers: no generator state."""
        return {"position": asdict(self), "queue": queue}


class CheckpointPlan:
    """Where checkpoints are and when one is due."""

    def __init__(self, config: JobConfig, run_dir: Path) -> None:
        self._config = config
        self._directory = (run_dir / "checkpoints").resolve()

    @property
    def root(self) -> str:
        """The directory of all checkpoints, as the ranks see it."""
        return str(self._directory)

    def exist(self) -> bool:
        """Whether there is a complete one."""
        return self._directory.is_dir() and bool(complete_checkpoints(self._directory))

    def due(self, at: JobPosition) -> bool:
        """Whether to save now: every `save_interval` rollouts, and at the end."""
        interval = self._config.save_interval
        if interval is None:
            return False
        return at.rollouts % interval == 0 or at.rollouts == self._config.num_rollouts

    def require_for(self, error: ParallelError) -> None:
        """Raises `error`, with advice, if the job keeps no checkpoints to restart from."""
        if self._config.save_interval is None and not self.exist():
            raise ParallelError(
                f"{error}\nThe job keeps no checkpoints and ends; with --save-interval it would restart from the last "
                "one"
            ) from error


class RestartLimit:
    """Counts restarts of the trainer; those without a new rollout in between are limited."""

    def __init__(self, limit: int) -> None:
        self._limit, self._in_a_row, self._furthest = limit, 0, -1
        self.total = 0

    def count(self, rollouts: int, error: ParallelError) -> None:
        """One restart more, after so many rollouts; an error if there were too many in a row."""
        if rollouts > self._furthest:
            self._in_a_row, self._furthest = 0, rollouts
        if self._in_a_row >= self._limit:
            raise ParallelError(
                f"the trainer was restarted {self._in_a_row} times without getting further than rollout {rollouts}, "
                f"the limit of --max-restarts; the last error: {error}"
            ) from error
        self._in_a_row += 1
        self.total += 1


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
