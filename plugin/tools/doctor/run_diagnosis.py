"""What went wrong in a run, from the files in its directory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plugin.errors import ConfigError
from plugin.observe.chain_stages import chain_lines, chain_rows
from plugin.observe.learning import run_findings
from plugin.observe.run_record import RunRecord, read_run, steps_text
from plugin.tools.compare.dump_reading import open_dump
from plugin.tools.compare.offline_detection import OfflineDetection


def diagnose(run_dir: str | Path) -> dict[str, Any]:
    """Findings of a run (one entry per kind), facts worth a line, and what could not be read."""
    record = read_run(run_dir)
    findings = run_findings(record)
    config = record.job_config()
    if config is not None and config.dump_log_probs and not config.detect_mismatch:
        findings += _findings_of_dump(record, config.dump_log_probs)
    return {
        "run_dir": str(record.path),
        "healthy": not any(finding.get("severity") == "error" for finding in findings),
        "facts": _facts(record),
        "chain": chain_rows(record.steps[-1]) if record.steps else [],
        "findings": findings,
        "problems": record.problems,
    }


def as_text(diagnosis: Mapping[str, Any]) -> str:
    """A diagnosis for a person."""
    lines = [f"{diagnosis['run_dir']}: {'; '.join(diagnosis['facts'])}"]
    if diagnosis["chain"]:
        lines += ["\nwhat each correction did in the last step:", *chain_lines(diagnosis["chain"])]
    for finding in diagnosis["findings"]:
        lines.append(f"\n{finding.get('severity')}: {finding.get('title')} ({steps_text(finding)})")
        for key in ("evidence", "likely_cause", "what_to_try"):
            lines.append(f"  {key.replace('_', ' ')}: {finding.get(key)}")
    lines += [f"\nnot readable: {problem}" for problem in diagnosis["problems"]]
    if not diagnosis["findings"]:
        lines.append("\nnothing was found wrong")
    return "\n".join(lines)


def _facts(record: RunRecord) -> list[str]:
    """How far the run came, and what it lost on the way."""
    if not record.steps:
        return ["no step was recorded: it failed before the first one, or has just started"]
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
    """What the detectors say about the log-probs that the run kept, if they are still there."""
    try:
        dump = open_dump([directory])
    except (ConfigError, OSError) as error:
        record.problems.append(str(error))
        return []
    detection = OfflineDetection(config=record.job_config())
    for block, _ in dump.blocks():
        detection.add(block)
    record.problems += dump.problems
    return [repeated.as_dict() for repeated in detection.findings.values()]
