"""Reading a run directory; `run_files.py` writes it and lists its files.

A broken line or file is named in `problems`, and the rest is used.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plugin.config import JobConfig
from plugin.config.flags import without_credentials
from plugin.config.loss.policy_loss import POLICY_LOSS_TRAITS
from plugin.errors import ConfigError, MegatronTisError
from plugin.json_lines import parse_yaml, read_json_lines, read_settings


@dataclass
class RunRecord:
    """What a run directory holds, as far as it could be read.

    steps: metrics of every step in order; a run that went back to a checkpoint repeats some, and
        the records after that checkpoint are dropped
    evaluations: in order, with the step that each was made after; 0 = before the first
    problems: what could not be read, with file and line
    settings_unreadable: whether there is a config.yaml that could not be read
    """

    name: str
    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    settings_unreadable: bool = False

    def job_config(self) -> JobConfig | None:
        """The settings as a configuration; None if they are missing or from a different version.

        Code that they name by import path is not run: the directory may be somebody else's.
        """
        if self.config.get("policy_loss") not in POLICY_LOSS_TRAITS:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return JobConfig(**{**self.config, "custom_detector_path": None})
        except (MegatronTisError, TypeError, ValueError):
            return None


def read_run(run_dir: str | Path) -> RunRecord:
    """Read metrics, findings and settings of a run."""
    path = Path(run_dir)
    metrics = path / "metrics.jsonl"
    if not path.is_dir():
        raise ConfigError(f"{path} is not a run directory; give one that has a metrics.jsonl")
    findings = path / "findings.jsonl"
    if not metrics.exists() and not findings.exists():
        raise ConfigError(f"{path} has no metrics.jsonl; give the run directory of a job")
    record = RunRecord(name=path.resolve().name, path=path)
    numbered = []
    # A job that ended before its first step has findings only.
    for line in _read_lines(metrics, record.problems) if metrics.exists() else ():
        step = line.get("step")
        if isinstance(step, (int, float)) and abs(step) < 1 << 53:
            numbered.append(((int(step), _is_evaluation(line)), line))
        else:
            record.problems.append(f"{metrics}: a line without a step was skipped")
    course = _without_replaced(numbered)
    record.steps = [line for line in course if not _is_evaluation(line)]
    record.evaluations = [line for line in course if _is_evaluation(line)]
    if findings.exists():
        record.findings = list(_read_lines(findings, record.problems))
    settings, problems = path / "config.yaml", len(record.problems)
    record.config = _read_config(settings, record.problems)
    record.settings_unreadable = settings.exists() and len(record.problems) > problems
    return record


def require_content(records: Sequence[RunRecord]) -> None:
    """Raise a `ConfigError` if no run holds anything to tell: that is no healthy run."""
    if any(record.steps or record.evaluations or record.findings for record in records):
        return
    first = records[0]
    cause = "the job failed before its first step, or has just started"
    raise ConfigError(
        f"{first.path}: no step was recorded: {first.problems[0] if first.problems else cause}"
    )


def read_prompts(run_dir: str | Path) -> list[dict[str, Any]]:
    """The records of prompts.jsonl by rollout; those of repeated rollouts as with steps."""
    lines = _read_lines(Path(run_dir) / "prompts.jsonl", [])
    numbered = [(line["rollout"], line) for line in lines if isinstance(line.get("rollout"), int)]
    return _without_replaced(numbered)


def _is_evaluation(line: Mapping[str, Any]) -> bool:
    return any(name.startswith("eval/") for name in line)


def read_samples(run_dir: str | Path) -> list[dict[str, Any]]:
    """The samples of samples.jsonl, each with its step; those of repeated steps as with steps.

    A `ConfigError` if there are none.
    """
    path = Path(run_dir) / "samples.jsonl"
    if not path.exists():
        raise ConfigError(f"{path.parent} has no samples.jsonl; give a run with --log-samples")
    problems: list[str] = []
    lines = [line for line in _read_lines(path, problems) if isinstance(line.get("step"), int)]
    if not lines and problems:
        raise ConfigError(problems[0])
    return [
        {"step": line["step"], **sample}
        for line in _without_replaced([(line["step"], line) for line in lines])
        for sample in line.get("samples") or ()
        if isinstance(sample, dict)
    ]


def _without_replaced(numbered: list[tuple[Any, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The records in order, without those that a later record with a smaller number replaces."""
    kept: list[tuple[Any, dict[str, Any]]] = []
    for number, record in numbered:
        while kept and kept[-1][0] >= number:
            kept.pop()
        kept.append((number, record))
    return [record for _, record in kept]


def group_findings(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry per kind of finding, as first found: unmistakable ones first, then by severity.

    records: as in findings.jsonl. An entry also has its `last_step` and the number of its `steps`.
    """
    groups: dict[str, dict[str, Any]] = {}
    for record in records:
        step = record.get("step")
        new = {**record, "last_step": step, "steps": 0}
        entry = groups.setdefault(f"{record.get('detector')}/{record.get('title')}", new)
        if entry["steps"] == 0 or entry["last_step"] != step:
            entry["last_step"], entry["steps"] = step, entry["steps"] + 1
    order = ("error", "warning", "info")
    return sorted(
        groups.values(),
        key=lambda entry: (
            not entry.get("unmistakable"),
            order.index(s) if (s := entry.get("severity")) in order else len(order),
        ),
    )


def unmistakable_titles(run_dir: Path) -> list[str]:
    """The findings of a run that no healthy job has, each once, with their steps."""
    path = run_dir / "findings.jsonl"
    records = _read_lines(path, []) if path.exists() else ()
    found = [entry for entry in group_findings(records) if entry.get("unmistakable")]
    return [f"{entry.get('title')} ({steps_text(entry)})" for entry in found]


def steps_text(entry: Mapping[str, Any]) -> str:
    """At which steps a grouped finding was made, and how often."""
    first, last = entry.get("step"), entry.get("last_step", entry.get("step"))
    if first == last:
        return f"step {first}"
    times = f", {entry['steps']} times" if "steps" in entry else ""
    return f"steps {first} to {last}{times}"


def _read_lines(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    for line in read_json_lines(path):
        if line.value is None:
            problems.append(f"{path}: line {line.number} is skipped: {line.problem}")
            continue
        # One string per name, not per line: most of what a long history would hold.
        yield {
            sys.intern(key): float(value)
            if value in ("nan", "inf", "-inf")
            else _within_floats(value)
            for key, value in line.value.items()
        }


def _within_floats(value: Any) -> Any:
    """`value` with the integers in it that are larger than every float as infinity."""
    if isinstance(value, dict):
        return {key: _within_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_within_floats(item) for item in value]
    if isinstance(value, int) and value.bit_length() > sys.float_info.max_exp - 1:
        return float("inf") if value > 0 else float("-inf")
    return value


def _read_config(path: Path, problems: list[str]) -> dict[str, Any]:
    import yaml

    try:
        loaded = parse_yaml(read_settings(path))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        problems.append(
            f"{path}: not readable ({type(error).__name__}); the report shows no settings"
        )
        return {}
    if not isinstance(loaded, dict):
        problems.append(f"{path}: not readable (no mapping); the report shows no settings")
        return {}
    return {
        key: without_credentials(value) if isinstance(value, str) else value
        for key, value in loaded.items()
    }
