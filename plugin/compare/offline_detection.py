"""Runs the detectors over a dump, step after step, and joins what they repeat."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from plugin.observe.detectors import MismatchDetectors
from plugin.observe.dump_columns import DumpBlock
from plugin.observe.findings import Finding, tokens_of_block
from plugin.observe.routing_agreement import routing_finding


@dataclasses.dataclass
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
    """Feed it blocks in order; `findings` is what was found so far."""

    def __init__(self) -> None:
        self._detectors = MismatchDetectors()
        self._found: dict[str, RepeatedFinding] = {}

    @property
    def findings(self) -> list[RepeatedFinding]:
        return list(self._found.values())

    def add(self, block: DumpBlock) -> None:
        """Check every step of a block; a step that is spread over blocks is checked once for each."""
        for step in np.unique(block.step):
            self._check(block, block.step == step, int(step))

    def _check(self, block: DumpBlock, rows: np.ndarray, step: int) -> None:
        versions, trainer = block.weight_version[rows], block.trainer_version[rows]
        known = (versions >= 0) & (trainer >= 0)
        staleness = float((trainer - versions)[known].mean()) if known.any() else None
        found = self._detectors.check_tokens(
            tokens_of_block(block, rows),
            staleness,
            float(versions.max()) if known.any() else None,
            float(trainer.max()) if known.any() else None,
        )
        routes = [
            [values[i] for i in np.flatnonzero(rows)] if values else None
            for values in map(block.routes.get, ("rollout_routed_experts", "train_routed_experts"))
        ]
        routing = routing_finding(*routes)
        for finding in found + ([routing] if routing else []):
            self._remember(finding, step)

    def _remember(self, finding: Finding, step: int) -> None:
        earlier = self._found.get(finding.detector)
        if earlier is None:
            self._found[finding.detector] = RepeatedFinding(finding, step, step)
        elif earlier.last_step != step:
            earlier.last_step, earlier.steps = step, earlier.steps + 1
