"""What a resumed job finds in its run directory: steps, settings, and checkpoints to go back to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from plugin.config import JobConfig
from plugin.config.flags import read_yaml
from plugin.errors import ConfigError
from plugin.megatron_backend.checkpoint.directory import (
    BEST,
    best_checkpoint,
    complete_checkpoints,
    is_checkpoint,
    mark_best,
    resolve,
    step_of,
)
from plugin.observe.run_files import plain_settings, without_slices
from plugin.observe.run_record import read_run
from plugin.tasks.prompt_data import PromptDataset

#: Where a run directory keeps them.
CHECKPOINTS = "checkpoints"


def earlier_history(
    run_dir: Path,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """The steps and evaluations of the run so far, none if it is new; and what was unreadable."""
    if not (run_dir / "metrics.jsonl").exists():
        return [], [], []
    record = read_run(run_dir)
    return [without_slices(step) for step in record.steps], record.evaluations, record.problems


def earlier_settings(run_dir: Path) -> dict[str, Any]:
    """The settings of the run so far; none if the directory is new."""
    file = run_dir / "config.yaml"
    if not file.exists():
        return {}
    try:
        return JobConfig.without_aliases(read_yaml(file, "--run-dir"))
    except ConfigError as error:
        raise ConfigError(
            f"{error}; repair it, or delete it to go on without comparing settings"
        ) from error


def changed_settings(run_dir: Path, config: JobConfig) -> Iterator[str]:
    """Settings that differ from those of the run so far and change what is trained."""
    before, now = earlier_settings(run_dir), plain_settings(config.as_dict())
    harmless = {item.name for item in fields(config) if item.metadata["may_change_on_resume"]}
    for name in sorted(set(before) & set(now) - harmless):
        if before[name] != now[name]:
            yield f"--{name.replace('_', '-')} was {before[name]}, is {now[name]}"


def find_checkpoint(root: Path, name: str | None, option: str = "--resume-from") -> Path | None:
    """The checkpoint that `option` names, or the latest; None if there is none yet."""
    complete = complete_checkpoints(root)
    if name is None:
        return resolve(root) if complete else None
    if name == BEST and (best := best_checkpoint(root)) is not None:
        return best
    for path in complete:
        if name.removeprefix("step_").lstrip("0") == str(step_of(path)):
            return path
    there = ", ".join(path.name for path in complete) or "none"
    if best_checkpoint(root) is not None:
        there += f", {BEST}"
    raise ConfigError(
        f"{option} {name}: {root} holds no such checkpoint; complete ones there: {there}"
    )


def find_source(path: Path, name: str | None) -> tuple[Path, Path]:
    """The run directory and the checkpoint that a command was given.

    path: a run directory, of which `name` or the latest is taken; or one of its checkpoints
    """
    whole = path.resolve()
    if not whole.is_dir():
        raise ConfigError(f"{path} is not a directory; give a run directory or a checkpoint")
    if is_checkpoint(whole):
        if name is not None:
            raise ConfigError(f"--checkpoint {name}: {path} is a checkpoint already; drop one")
        run_dir = whole.parent.parent
        if not (run_dir / "config.yaml").is_file():
            raise ConfigError(
                f"{path} is not in the run directory that it was written to: {run_dir} has no "
                "config.yaml, which says what the model is; copy it there"
            )
        return run_dir, whole
    earlier = whole / "config.yaml"
    if not earlier.is_file():
        raise ConfigError(
            f"{path} is neither a run directory (it has no config.yaml) nor a checkpoint"
        )
    read_yaml(earlier, "RUN_DIR")
    chosen = find_checkpoint(whole / CHECKPOINTS, name, "--checkpoint")
    if chosen is None:
        raise ConfigError(
            f"{path} holds no complete checkpoint; give the run directory of a job that saved "
            "one (--save-interval, or at the end)"
        )
    return whole, chosen


def warn_of_other_rows(
    data: PromptDataset | None, state: Mapping[str, Any], warn: Callable[[str], None]
) -> None:
    """Warn if a checkpoint's position counts in other rows than `data`."""
    if data is not None and state.get("data", data.fingerprint) != data.fingerprint:
        warn(
            "the prompts are not those that the checkpoint was trained on: the same numbers now "
            "mean other rows, and some may be trained on twice or never"
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

    def best(self) -> Path | None:
        """The one that was marked as the best."""
        best = best_checkpoint(self.root)
        return best if best is not None and step_of(best) in self._steps else None

    def mark_best(self, step: int) -> None:
        """Mark the checkpoint of `step`, which has been saved."""
        [saved] = [path for path in complete_checkpoints(self.root) if step_of(path) == step]
        mark_best(saved)
