"""Who may write a run directory: one job at a time, and a new run only where none is."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from plugin.cluster.directory_lock import lock_directory, refuse_locked
from plugin.config import JobConfig
from plugin.config.flags import expect, option_name
from plugin.controller.records.resuming import CHECKPOINTS, earlier_settings, find_checkpoint
from plugin.errors import ConfigError
from plugin.megatron_backend.checkpoint.directory import remove_checkpoints
from plugin.observe.log_prob_dump import dump_files
from plugin.observe.run_files import RUN_FILES

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
    _check_model_target(run_dir, config)
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


def _check_model_target(run_dir: Path, config: JobConfig) -> None:
    for flag, name in _TARGETS.items():
        replaces = (config.resumes or config.overwrite) and _wrote_models(run_dir, flag)
        expect(
            not getattr(config, flag) or replaces or not _holds(run_dir / name),
            f"{option_name(flag)} would write to {run_dir / name}, which is not empty and not of "
            "this run; move it away, or choose another --run-dir",
        )


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
