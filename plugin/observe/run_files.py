"""The files of a run directory: written while a job runs, read afterwards by the report.

    config.yaml      the resolved configuration
    metrics.jsonl    one object per step
    prompts.jsonl    one object per rollout: the numbers of the prompts trained on, and of those dropped, by cause
    findings.jsonl   what the mismatch detectors said, one object per finding
    events.out.*     TensorBoard
    report.html      written at the end, or by `megatron-tis report`

Lines are appended and flushed to disk one by one, so a crash loses at most the line being written; readers
skip a broken line. A disk that cannot be written to costs one warning, never the training.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plugin.errors import ConfigError

#: What every line of metrics.jsonl has, whatever else a job adds.
REQUIRED_METRICS = (
    "step",
    "reward",
    "loss",
    "grad_norm",
    "mismatch_kl",
    "staleness",
    "tokens_per_second",
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
    """A step's metrics without those by position, age and probability, which are most of them."""
    return {name: value for name, value in step.items() if not _is_slice(name)}


class RunFiles:
    """Writer of one run directory. A directory of an earlier part of the same run is continued."""

    def __init__(
        self, run_dir: str | Path, config: Mapping[str, Any], *, tensorboard: bool = True
    ) -> None:
        self.run_dir = Path(run_dir)
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            _write_config(self.run_dir / "config.yaml", config)
            for name in ("metrics.jsonl", "prompts.jsonl", "findings.jsonl"):
                _end_broken_line(self.run_dir / name)
        except OSError as error:
            raise ConfigError(
                f"--run-dir {self.run_dir} cannot be written ({error.strerror}); choose another directory"
            ) from error
        self._broken = False
        self._events = _event_writer(self.run_dir) if tensorboard else None

    def log_step(self, metrics: Mapping[str, Any]) -> None:
        """Append one step to metrics.jsonl and TensorBoard; `REQUIRED_METRICS` that are missing become null."""
        if "step" not in metrics:
            raise ConfigError(
                "log_step was called without a step; every line of metrics.jsonl has one"
            )
        record = {name: metrics.get(name) for name in REQUIRED_METRICS} | dict(metrics)
        self._append("metrics.jsonl", record)
        if self._events is not None and not self._broken:
            step = int(metrics["step"])
            for name, value in record.items():
                if name != "step" and isinstance(value, (int, float)) and _for_tensorboard(name):
                    self._events.add_scalar(name, value, step)

    def log_prompts(
        self, rollout: int, trained: Iterable[int], dropped: Mapping[str, Iterable[int]]
    ) -> None:
        """Append which prompts a rollout was trained on and which were dropped before it.

        As with the metrics, the last record of a rollout counts: one that is repeated after a restart replaces it.
        """
        record = {"rollout": rollout, "trained": list(trained)}
        self._append(
            "prompts.jsonl", {**record, "dropped": {c: list(i) for c, i in dropped.items()}}
        )

    def log_findings(self, step: int, findings: Iterable[Any]) -> None:
        """Append what the detectors found at `step` (objects with `as_dict`, or mappings)."""
        for finding in findings:
            entry = dict(finding) if isinstance(finding, Mapping) else finding.as_dict()
            self._append("findings.jsonl", {"step": step, **entry})

    def write_report(self) -> Path | None:
        """Write report.html; None (and a warning) where the disk refuses."""
        from plugin.observe.html_report import write_report

        try:
            return write_report([self.run_dir], self.run_dir / "report.html", force=True)
        except OSError as error:
            self._give_up("report.html", error)
            return None

    def close(self) -> None:
        """Flush and close the TensorBoard file."""
        if self._events is not None:
            try:
                self._events.close()
            except OSError as error:
                self._give_up("TensorBoard events", error)
            self._events = None

    def __enter__(self) -> RunFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        line = json.dumps({key: _jsonable(value) for key, value in record.items()}, allow_nan=False)
        try:
            with open(self.run_dir / name, "a", encoding="utf-8") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._give_up(name, error)

    def _give_up(self, name: str, error: OSError) -> None:
        if not self._broken:
            warnings.warn(
                f"{self.run_dir / name} cannot be written ({error.strerror}); training goes on without it. "
                "Free the disk and restart from a checkpoint to have complete files",
                stacklevel=3,
            )
        self._broken = True


@dataclass
class RunRecord:
    """What a run directory holds, as far as it could be read.

    steps: metrics of every step in order; the last record of a step wins (a resumed run repeats some)
    problems: what could not be read, with file and line
    """

    name: str
    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_run(run_dir: str | Path) -> RunRecord:
    """Read a run directory; broken lines and files are named in `problems`, the rest is used."""
    path = Path(run_dir)
    if not path.is_dir():
        raise ConfigError(f"{path} is not a run directory; give one that has a metrics.jsonl")
    if not (path / "metrics.jsonl").exists():
        raise ConfigError(f"{path} has no metrics.jsonl; give the run directory of a job")
    record = RunRecord(name=path.resolve().name, path=path)
    by_step: dict[int, dict[str, Any]] = {}
    for line in _read_lines(path / "metrics.jsonl", record.problems):
        step = line.get("step")
        if isinstance(step, (int, float)) and math.isfinite(step):
            by_step[int(step)] = line
        else:
            record.problems.append(f"{path / 'metrics.jsonl'}: a line without a step was skipped")
    record.steps = [by_step[step] for step in sorted(by_step)]
    if (path / "findings.jsonl").exists():
        record.findings = list(_read_lines(path / "findings.jsonl", record.problems))
    record.config = _read_config(path / "config.yaml", record.problems)
    return record


def read_prompts(run_dir: str | Path) -> list[dict[str, Any]]:
    """The records of prompts.jsonl by rollout: of one that a restart repeated the last counts."""
    lines = _read_lines(Path(run_dir) / "prompts.jsonl", [])
    by_rollout = {line["rollout"]: line for line in lines}
    return [by_rollout[rollout] for rollout in sorted(by_rollout)]


def _read_lines(path: Path, problems: list[str]) -> Iterable[dict[str, Any]]:
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                parsed = json.loads(line)
            except ValueError:
                parsed = None
            if isinstance(parsed, dict):
                yield {key: _from_json(value) for key, value in parsed.items()}
            else:
                problems.append(f"{path}: line {number} is not a complete JSON object; skipped")


def _read_config(path: Path, problems: list[str]) -> dict[str, Any]:
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problems.append(
            f"{path}: not readable ({type(error).__name__}); the report shows no settings"
        )
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write config.yaml; an earlier, different one is kept as config.1.yaml, config.2.yaml, ..."""
    import yaml

    text = yaml.safe_dump(plain_settings(config), sort_keys=False)
    if path.exists():
        if path.read_text(encoding="utf-8") == text:
            return
        number = 1
        while path.with_name(f"config.{number}.yaml").exists():
            number += 1
        os.replace(path, path.with_name(f"config.{number}.yaml"))
    temporary = path.with_suffix(".yaml.partial")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _end_broken_line(path: Path) -> None:
    """Close a last line that a crash cut off, so that the next record starts on a line of its own."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with open(path, "rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def _event_writer(run_dir: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        warnings.warn(
            "tensorboard is not installed, so the run has no event files; pip install tensorboard",
            stacklevel=3,
        )
        return None
    return SummaryWriter(log_dir=str(run_dir))


def _is_slice(name: str) -> bool:
    return "/by_" in name


def _for_tensorboard(name: str) -> bool:
    """Every metric, and of the slices only those that people graph; metrics.jsonl has all."""
    return not _is_slice(name) or name.endswith(("/k3", "/ess_share"))


def plain_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as config.yaml holds them."""
    return {key: _plain(value) for key, value in config.items()}


def _plain(value: Any) -> Any:
    """A value that YAML's safe dumper knows."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _jsonable(value: Any) -> Any:
    """Numbers at 7 significant digits; NaN and infinities as strings, which JSON has no number for."""
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


def _from_json(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value
