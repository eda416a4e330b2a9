"""The mismatch detectors at every step of a job: findings go to a file, news to the console."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plugin.config import JobConfig
from plugin.errors import FindingError
from plugin.observe.detectors import MismatchDetectors
from plugin.observe.run_files import RunFiles


class MismatchWatch:
    """Runs the detectors on a step's log-probs and says what is new."""

    def __init__(self, config: JobConfig, files: RunFiles, log: Callable[[str], None]) -> None:
        self._detectors = MismatchDetectors(config=config)
        self._counts: Counter[str] = Counter()
        self._on, self._stops = config.detect_mismatch, config.on_finding == "stop"
        self._files, self._log = files, log

    def check(
        self,
        step: int,
        columns: Mapping[str, Sequence[Any]],
        trainer_version: int,
        live_routes: Sequence[Any] | None = None,
    ) -> None:
        """Check one step; columns as in `RolloutBatch`, with the trainer's `log_probs`.

        A `FindingError` for an unmistakable finding, with --on-finding stop.

        live_routes: the trainer's own choices of experts for the first samples
        """
        if live_routes is not None:
            columns = {**columns, "train_routed_experts": live_routes}
        if not self._on or "rollout_log_probs" not in columns:
            return
        findings = self._detectors.check(columns, step=step, trainer_version=trainer_version)
        self._files.log_findings(step, findings)
        self._counts.update(finding.detector for finding in findings)
        for finding in findings:
            if finding.unmistakable and self._stops:
                raise FindingError(f"step {step}: {finding.text}")
        for finding in self._detectors.news(findings, step):
            times = self._counts[finding.detector]
            again = f"again ({times} times so far): {finding.title}"
            self._log(f"step {step}: {finding if times == 1 else again}")
