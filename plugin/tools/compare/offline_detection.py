"""Runs the detectors over a dump, step after step, and joins what they repeat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from plugin.config import JobConfig
from plugin.observe.detectors import MismatchDetectors
from plugin.observe.dump_columns import DumpBlock
from plugin.observe.findings import Finding


@dataclass
class RepeatedFinding:
    """A finding with the steps it was made at; the evidence is that of its first step."""

    finding: Finding
    first_step: int
    last_step: int
    steps: int = 1

    def as_dict(self) -> dict[str, Any]:
        seen = {"step": self.first_step, "last_step": self.last_step, "steps": self.steps}
        return {**self.finding.as_dict(), **seen}


class OfflineDetection:
    """Feed it blocks in order; `findings` is what was found so far, by detector."""

    def __init__(self, custom_path: str | None = None, config: JobConfig | None = None) -> None:
        self.findings: dict[str, RepeatedFinding] = {}
        self._detectors = MismatchDetectors(custom_path=custom_path, config=config)

    def add(self, block: DumpBlock) -> None:
        """Check every step of a block; one that is spread over blocks is checked once for each."""
        columns = block.batch_columns()
        for step in np.unique(block.step).tolist():
            rows = np.flatnonzero(block.step == step)
            found = self._detectors.check(
                {name: [values[i] for i in rows] for name, values in columns.items()},
                step=step,
                trainer_version=block.trainer_version[rows].tolist(),
            )
            for finding in found:
                earlier = self.findings.get(finding.detector)
                if earlier is None:
                    self.findings[finding.detector] = RepeatedFinding(finding, step, step)
                elif earlier.last_step != step:
                    earlier.last_step, earlier.steps = step, earlier.steps + 1
