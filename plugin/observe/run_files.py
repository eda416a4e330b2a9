"""Writing a run directory while a job runs; `run_record.py` reads it.

    config.yaml      the resolved configuration
    metrics.jsonl    one object per step, and one per evaluation: the step it was made after, and
                     eval/<set>/<metric>
    prompts.jsonl    one object per rollout: the numbers of the prompts trained on, and of those
                     dropped, by cause
    samples.jsonl    one object per rollout: a few samples with their texts and rewards
    findings.jsonl   what the mismatch detectors found, one object per finding
    events.out.*     TensorBoard
    groups.*.journal groups that are scored and not trained on, for a resumed run
    report.html      written at the end, or by `megatron-tis report`
    lock             held by the job that writes here

Lines are appended and flushed to disk one by one, so a crash loses at most the line being written.
A disk that cannot be written to costs one warning, never the training.
"""

from __future__ import annotations

import io
import json
import math
import os
import socket
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from plugin.config.flags import without_credentials
from plugin.errors import ConfigError
from plugin.observe.html_report import write_report
from plugin.observe.metric_table import REQUIRED_METRICS

#: Groups that are scored and not trained on, see `plugin.controller.queue.group_journal`.
JOURNAL_FILES = "groups.[0-9]*.journal"
#: All that a run writes besides `checkpoints/`, `model/` and `models/`, as patterns.
RUN_FILES = (
    *("config.yaml", "config.[0-9]*.yaml", "config.yaml.partial", "report.html"),
    *("metrics.jsonl", "prompts.jsonl", "samples.jsonl", "findings.jsonl", "events.out.tfevents.*"),
    "engine_[0-9]*.log",
    JOURNAL_FILES,
)


def new_run_dir(name: str, root: str | Path = "runs") -> Path:
    """A directory `<root>/<time>-<name>` that does not exist yet; it is not created."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    candidate, attempt = Path(root) / f"{stamp}-{name}", 1
    while candidate.exists():
        attempt += 1
        candidate = Path(root) / f"{stamp}-{name}-{attempt}"
    return candidate


def without_slices(step: Mapping[str, Any]) -> dict[str, Any]:
    """A step's metrics without the many slices by position, staleness and probability."""
    return {name: value for name, value in step.items() if "/by_" not in name}


class RunFiles:
    """Writer of one run directory. A directory of an earlier part of the run is continued."""

    def __init__(
        self, run_dir: str | Path, config: Mapping[str, Any], *, tensorboard: bool = True
    ) -> None:
        self.run_dir = Path(run_dir)
        try:
            # Prompts and responses may be private; an existing directory keeps its permissions.
            self.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write_config(self.run_dir / "config.yaml", config)
            for name in ("metrics.jsonl", "prompts.jsonl", "samples.jsonl", "findings.jsonl"):
                _end_broken_line(self.run_dir / name)
            self._events = _EventFile.new(self.run_dir) if tensorboard else None
        except OSError as error:
            raise ConfigError(
                f"--run-dir {self.run_dir} cannot be written ({error.strerror}); choose another "
                "directory"
            ) from error
        self._broken = False

    def log_step(self, metrics: Mapping[str, Any]) -> None:
        """Append one step to metrics.jsonl and TensorBoard.

        Missing `REQUIRED_METRICS` become null. Of the slices TensorBoard gets only those that
        people graph.
        """
        if "step" not in metrics:
            raise ConfigError(
                "log_step was called without a step; every line of metrics.jsonl has one"
            )
        self._log({name: metrics.get(name) for name in REQUIRED_METRICS} | dict(metrics))

    def log_evaluation(self, metrics: Mapping[str, Any]) -> None:
        """Append an evaluation to metrics.jsonl and TensorBoard; `step` is the last one before."""
        self._log(metrics)

    def _log(self, record: Mapping[str, Any]) -> None:
        self._append("metrics.jsonl", record)
        if self._events is None or self._broken:
            return
        graphed = {
            name: float(value)
            for name, value in record.items()
            if name != "step" and isinstance(value, (int, float))
            if "/by_" not in name or name.endswith(("/k3", "/ess_share"))
        }
        try:
            self._events.write(int(record["step"]), graphed)
        except OSError as error:
            self._warn_once("events.out.tfevents.*", error)

    def log_prompts(
        self, rollout: int, trained: Iterable[int], dropped: Mapping[str, Iterable[int]]
    ) -> None:
        """Append which prompts a rollout was trained on and which were dropped before it.

        As with the metrics, the last record of a rollout counts: one that is repeated after a
        restart replaces it.
        """
        by_cause = {cause: list(prompts) for cause, prompts in dropped.items()}
        record = {"rollout": rollout, "trained": list(trained), "dropped": by_cause}
        self._append("prompts.jsonl", record)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Append the samples of the rollout whose first update is `step`; counts as in prompts."""
        self._append("samples.jsonl", {"step": step, "samples": samples})

    def log_findings(self, step: int, findings: Iterable[Any]) -> None:
        """Append what the detectors found at `step` (objects with `as_dict`, or mappings)."""
        for finding in findings:
            entry = dict(finding) if isinstance(finding, Mapping) else finding.as_dict()
            self._append("findings.jsonl", {"step": step, **entry})

    def write_report(self) -> Path | None:
        """Write report.html; None (and a warning) if that fails."""
        try:
            return write_report([self.run_dir], self.run_dir / "report.html", force=True)
        except ConfigError as error:
            if not self._broken:  # else the warning has been given
                warnings.warn(f"the run has no report: {error}", stacklevel=2)
            return None

    def close(self) -> None:
        """Write no more TensorBoard events."""
        self._events = None

    def __enter__(self) -> RunFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        line = json.dumps(_jsonable(record), allow_nan=False)
        try:
            _append_whole(self.run_dir / name, (line + "\n").encode())
        except OSError as error:
            self._warn_once(name, error)

    def _warn_once(self, name: str, error: OSError) -> None:
        if not self._broken:
            warnings.warn(
                f"{self.run_dir / name} cannot be written ({error.strerror}); training goes on "
                "without it. Free the disk and restart from a checkpoint to have complete files",
                stacklevel=3,
            )
        self._broken = True


def _write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write config.yaml; an earlier, different one is kept as config.1.yaml, config.2.yaml, ..."""
    text = yaml.safe_dump(plain_settings(config), sort_keys=False)
    temporary = path.with_suffix(".yaml.partial")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if path.exists():
        if path.read_text(encoding="utf-8") == text:
            temporary.unlink()
            return
        number = 1
        while path.with_name(f"config.{number}.yaml").exists():
            number += 1
        # Linked, not moved: a job that is killed here must not leave a run without its settings.
        os.link(path, path.with_name(f"config.{number}.yaml"))
    os.replace(temporary, path)


def _end_broken_line(path: Path) -> None:
    """Close a last line that a crash cut off, so that the next record starts on its own line."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with open(path, "rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


class _EventFile:
    """A TensorBoard file of scalars.

    Written in the caller: the thread of `SummaryWriter` prints a traceback when the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._append(file_version="brain.Event:2")

    @classmethod
    def new(cls, run_dir: Path) -> _EventFile | None:
        """A file named as TensorBoard expects; None (and a warning) where it is not installed."""
        place = f"{time.time_ns() // 10**9:010d}.{socket.gethostname()}.{os.getpid()}"
        number = sum(1 for _ in run_dir.glob(f"events.out.tfevents.{place}.*"))
        try:
            return cls(run_dir / f"events.out.tfevents.{place}.{number}")
        except ImportError:
            warnings.warn(
                "tensorboard is not installed, so the run has no event files; pip install "
                "tensorboard",
                stacklevel=4,
            )
            return None

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append the scalars of a step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._append(step=step, summary=Summary(value=values))

    def _append(self, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **content).SerializeToString())
        _append_whole(self._path, record.getvalue())


def _append_whole(path: Path, content: bytes) -> None:
    """Append to a file and force it to disk; where that fails, the file is as it was."""
    with open(path, "ab", buffering=0) as file:
        before = file.tell()
        try:
            while content:
                content = content[file.write(content) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(before)
            raise


def plain_settings(value: Any) -> Any:
    """Settings as config.yaml holds them: types of YAML's safe dumper, no passwords in URLs."""
    if isinstance(value, Mapping):
        return {str(key): plain_settings(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain_settings(item) for item in value]
    if isinstance(value, (bool, int, float, type(None))):
        return value
    return without_credentials(str(value))


def _jsonable(value: Any) -> Any:
    """Numbers at 7 significant digits; NaN and infinities, which JSON does not have, as strings."""
    if isinstance(value, (bool, str, type(None), int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return float(f"{number:.7g}") if math.isfinite(number) else str(number)
