"""What went wrong in a run, from the files in its directory."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plugin.errors import ConfigError
from plugin.observe.console import text_table
from plugin.observe.findings import finding_text
from plugin.observe.learning import run_findings
from plugin.observe.run_record import RunRecord, read_run, require_content, steps_text
from plugin.tools.compare.comparison import DumpDetection
from plugin.tools.compare.dump_reading import open_dump

_STAGE = re.compile(r"chain/(\d+)_(.+)/(removed|weighted|weight)")


def diagnose(run_dir: str | Path) -> dict[str, Any]:
    """Findings of a run (one entry per kind), facts worth a line, and what could not be read."""
    record = read_run(run_dir)
    require_content([record])
    findings = run_findings(record)
    config = record.job_config()
    if config is not None and config.dump_log_probs and not config.detect_mismatch:
        findings += _findings_of_dump(record, config.dump_log_probs)
    wrong = any(finding.get("severity") == "error" for finding in findings)
    return {
        "run_dir": str(record.path),
        "healthy": not wrong and not record.settings_unreadable,
        "facts": _facts(record),
        "chain": chain_rows(record.steps[-1]) if record.steps else [],
        "findings": findings,
        "problems": record.problems,
    }


def as_text(diagnosis: Mapping[str, Any]) -> str:
    """The diagnosis as text."""
    lines = [f"{diagnosis['run_dir']}: {'; '.join(diagnosis['facts'])}"]
    if diagnosis["chain"]:
        lines += ["\nwhat each correction did in the last step:", *chain_lines(diagnosis["chain"])]
    for finding in diagnosis["findings"]:
        titled = {**finding, "title": f"{finding.get('title')} ({steps_text(finding)})"}
        lines.append(f"\n{finding.get('severity')}: {finding_text(titled)}")
    lines += [f"\nnot readable: {problem}" for problem in diagnosis["problems"]]
    if not diagnosis["findings"]:
        known = "" if diagnosis["healthy"] else " in what is readable"
        lines.append(f"\nnothing was found wrong{known}")
    return "\n".join(lines)


def _facts(record: RunRecord) -> list[str]:
    """Progress of the run, and what was skipped, restarted or dropped."""
    if not record.steps:
        return ["no step was recorded: the job failed before its first step, or has just started"]
    first, last = record.steps[0], record.steps[-1]
    total = _planned_steps(record.config)
    facts = [f"{last['step']} of {total} steps" if total else f"{last['step']} steps"]
    if total and last["step"] < total:
        facts[0] += ": it has not finished"
    if all(isinstance(step.get("reward"), (int, float)) for step in (first, last)):
        facts.append(f"reward {first['reward']:.3f} -> {last['reward']:.3f}")
    for name, text in (
        ("skipped_steps", "steps skipped"),
        ("trainer_restarts", "restarts of the trainer"),
        ("engine_restarts", "restarts of an engine"),
        ("dropped_stale", "prompts dropped as stale"),
        ("dropped_failed", "prompts dropped after failures"),
        ("dropped_uniform", "prompts dropped because all their rewards were equal"),
    ):
        count = last.get(name)
        if isinstance(count, (int, float)) and math.isfinite(count) and count > 0:
            facts.append(f"{count:g} {text}")
    return facts


def _planned_steps(config: Mapping[str, Any]) -> int | None:
    """The optimizer steps of a whole run with these settings; None if some are missing."""
    rollouts, epochs = config.get("num_rollouts"), config.get("num_updates_per_rollout", 1)
    if not isinstance(rollouts, int) or not isinstance(epochs, int):
        return None
    names = ("global_batch_size", "rollout_batch_size", "n_samples_per_prompt")
    counts = [count for name in names if isinstance(count := config.get(name), int) and count > 0]
    if len(counts) < len(names):
        return rollouts * epochs
    size, prompts, samples = counts
    return rollouts * epochs * -(-prompts * samples // size)


def _findings_of_dump(record: RunRecord, directory: str) -> list[dict[str, Any]]:
    """Findings of the detectors on the run's log-prob dump, if it still exists."""
    try:
        dump = open_dump([directory])
    except (ConfigError, OSError) as error:
        record.problems.append(str(error))
        return []
    detection = DumpDetection(config=record.job_config())
    for block, _ in dump.blocks():
        detection.add(block)
    record.problems += dump.problems
    return detection.findings()


def chain_rows(step: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per stage of a step's metrics, in order; none where there is no chain."""
    rows: dict[int, dict[str, Any]] = {}
    for name, value in step.items():
        if (found := _STAGE.fullmatch(name)) is not None:
            number = int(found[1])
            rows.setdefault(number, {"stage": number, "correction": found[2]})[found[3]] = value
    return [rows[number] for number in sorted(rows)]


def chain_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rows as aligned columns: shares of all tokens, and the mean weight after the stage."""
    table = [["stage", "correction", "removed", "weighted", "mean weight so far"]]
    for row in rows:
        shares = [f"{float(row.get(key, 0.0)):.2%}" for key in ("removed", "weighted")]
        weight = f"{float(row.get('weight', 0.0)):.4f}"
        table.append([str(row["stage"]), str(row["correction"]), *shares, weight])
    return [f"  {line}" for line in text_table(table)]
