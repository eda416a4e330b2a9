"""The run directory: which job may write it, and what a resumed one finds there.

One job writes at a time, and a new run starts only where none is. A resumed job reads the steps and
settings of the run so far, and its checkpoints.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from plugin.cluster.directory_lock import lock_directory, refuse_locked
from plugin.config import JobConfig
from plugin.config.flags import expect, option_name, read_yaml
from plugin.errors import ConfigError
from plugin.megatron_backend.checkpoint.directory import (
    BEST,
    best_checkpoint,
    complete_checkpoints,
    is_checkpoint,
    mark_best,
    remove_checkpoints,
    resolve,
    step_of,
)
from plugin.observe.log_prob_dump import dump_files
from plugin.observe.run_files import RUN_FILES, plain_settings, without_slices
from plugin.observe.run_record import read_run
from plugin.tasks.prompt_data import PromptDataset

CHECKPOINTS = "checkpoints"
MODEL, MODELS = "model", "models"
#: Where Hugging Face models are written, by the flag that asks for them.
_TARGETS = {"save_hf": MODEL, "save_hf_interval": MODELS}


def check_run_dir(run_dir: Path, config: JobConfig) -> None:
    """Refuse directories that another job writes, or that hold what this one must not touch."""
    refuse_locked(run_dir, "--run-dir")
    _check_contents(run_dir, config)


def _check_contents(run_dir: Path, config: JobConfig) -> None:
    """Refuse what this job must neither continue nor delete."""
    if not config.resumes and not config.overwrite:
        found = [name for name in ("metrics.jsonl", CHECKPOINTS) if _holds(run_dir / name)]
        expect(
            not found,
            f"--run-dir {run_dir} holds a run already ({', '.join(found)}); add --resume to go on "
            "with it, choose another directory, or add --overwrite to delete that run first",
        )
    if config.resumes:
        earlier_settings(run_dir)
        find_checkpoint(run_dir / CHECKPOINTS, config.resume_from)
    for flag, name in _TARGETS.items():
        replaces = (config.resumes or config.overwrite) and _wrote_models(run_dir, flag)
        expect(
            not getattr(config, flag) or replaces or not _holds(run_dir / name),
            f"{option_name(flag)} would write to {run_dir / name}, which is not empty and not of "
            "this run; move it away, or choose another --run-dir",
        )
    _check_dump(run_dir, config)


@contextlib.contextmanager
def claimed_run_dir(run_dir: Path, config: JobConfig) -> Iterator[None]:
    """Lock the directories that a job writes; --overwrite first deletes what a run wrote there."""
    with contextlib.ExitStack() as locks:
        locks.enter_context(lock_directory(run_dir, "--run-dir", 0o700))
        if config.dump_log_probs is not None:
            locks.enter_context(lock_directory(Path(config.dump_log_probs), "--dump-log-probs"))
        # Another job may have come and gone since the first check.
        _check_contents(run_dir, config)
        if config.overwrite:
            _remove_earlier_run(run_dir, config)
        yield


def _check_dump(run_dir: Path, config: JobConfig) -> None:
    if config.dump_log_probs is None or config.overwrite:
        return
    target = Path(config.dump_log_probs)
    if config.resumes:
        before = earlier_settings(run_dir).get("dump_log_probs")
        if before is not None and Path(before).resolve() == target.resolve():
            return
    files = dump_files(target)
    expect(
        not files,
        f"--dump-log-probs {target} holds the dump of another run ({len(files)} steps); choose an "
        "empty directory, or add --overwrite to delete it first",
    )


def _remove_earlier_run(run_dir: Path, config: JobConfig) -> None:
    """Delete what a run writes, and nothing else."""
    for flag, name in _TARGETS.items():
        if _wrote_models(run_dir, flag):
            shutil.rmtree(run_dir / name, ignore_errors=True)
    remove_checkpoints(run_dir / CHECKPOINTS)
    for pattern in RUN_FILES:
        for path in run_dir.glob(pattern):
            path.unlink()
    if config.dump_log_probs is not None:
        for _, path in dump_files(Path(config.dump_log_probs)):
            path.unlink()


def _wrote_models(run_dir: Path, flag: str) -> bool:
    """Whether the models that `flag` asks for are from the run in this directory."""
    try:
        return bool(earlier_settings(run_dir).get(flag))
    except ConfigError:
        return False


def _holds(path: Path) -> bool:
    """Whether there is something in a file or directory."""
    return any(path.iterdir()) if path.is_dir() else path.exists() and path.stat().st_size > 0


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


def group_key(config: JobConfig, data: PromptDataset | None) -> str:
    """Differs between runs whose prompts have other groups; the number of engines may change."""
    settings = plain_settings(config.as_dict())
    counted = {f.name: settings[f.name] for f in fields(config) if _changes_groups(f)}
    prompts = "" if data is None else data.fingerprint
    return hashlib.sha256(f"{json.dumps(counted, sort_keys=True)}{prompts}".encode()).hexdigest()


def _changes_groups(setting: Field[Any]) -> bool:
    harmless = setting.metadata["may_change_on_resume"]
    return not harmless and setting.name != "num_rollout_engines"


def find_checkpoint(root: Path, name: str | None, option: str = "--resume-from") -> Path | None:
    """The checkpoint that `option` names, or the latest; None if there is none yet."""
    complete = complete_checkpoints(root)
    if name is None:
        return resolve(root) if complete else None
    if name == BEST and (best := _best_in(root)) is not None:
        return best
    for path in complete:
        if name.removeprefix("step_").lstrip("0") == str(step_of(path)):
            return path
    there = ", ".join(path.name for path in complete) or "none"
    if _best_in(root) is not None:
        there += f", {BEST}"
    raise ConfigError(
        f"{option} {name}: {root} holds no such checkpoint; complete ones there: {there}"
    )


def evaluation_scores(config: JobConfig, records: list[dict[str, Any]]) -> dict[int, float]:
    """What --keep-best goes by: step -> mean on the first set; the initial weights do not count."""
    if not config.eval_data:
        return {}
    name = f"eval/{config.eval_sets[0][0]}/mean"
    return {r["step"]: r[name] for r in records if r.get("rollout") and name in r}


def _best_in(root: Path) -> Path | None:
    """The best checkpoint of a run: as marked, or by its evaluations if the marker is damaged."""
    marked, complete = best_checkpoint(root), complete_checkpoints(root)
    if marked is not None or not complete or not (root.parent / "config.yaml").is_file():
        return marked
    config = JobConfig.from_sources({}, root.parent / "config.yaml")
    _, evaluations, _ = earlier_history(root.parent)
    return _best_of(complete, evaluation_scores(config, evaluations)) if config.keep_best else None


def _best_of(checkpoints: list[Path], scores: Mapping[int, float]) -> Path | None:
    """The one with the highest score, of several the first."""
    scored = [path for path in checkpoints if step_of(path) in scores]
    return max(scored, key=lambda path: scores[step_of(path)], default=None)


def find_source(path: Path, name: str | None) -> tuple[Path, Path]:
    """The run directory and the checkpoint that a command was given.

    path: a checkpoint, or a run directory, whose checkpoint `name` or latest one is taken
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
        """Include the checkpoint of `step`; before it is saved, as the save may be interrupted."""
        self._steps.add(step)

    def add_until(self, last: Path) -> None:
        """Include `last`, which the run resumes from, and those before it."""
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

    def repair_best(self, scores: Mapping[int, float]) -> str | None:
        """Mark the best again if the marker is damaged, by the scores of steps; returns a warning.

        A marked checkpoint without a score stays marked: the evaluations may be what was lost.
        """
        marked = self.best()
        if marked is not None and step_of(marked) not in scores:
            return None
        own = [path for path in complete_checkpoints(self.root) if step_of(path) in self._steps]
        best = _best_of(own, scores)
        if best is None or best == marked:
            return None
        mark_best(best)
        return f"{self.root / BEST} was damaged; by the evaluations the best is {best.name}"

    def mark_best(self, step: int) -> None:
        """Mark the checkpoint of `step`, which has been saved."""
        [saved] = [path for path in complete_checkpoints(self.root) if step_of(path) == step]
        mark_best(saved)
