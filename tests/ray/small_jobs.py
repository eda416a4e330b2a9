"""Short jobs on the two-node cluster."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from plugin.config import JobConfig
from plugin.controller.job import JobResult, run_job

SIZES = {
    "num_nodes": 2,
    "num_rollouts": 3,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "max_response_length": 6,
    "lr": 1e-3,
    "start_timeout": 250.0,
    "step_timeout": 120.0,
}


def run_small(
    address: str, run_dir: Path, *, learns_every_step: bool = True, **settings: Any
) -> JobResult:
    """Three steps of a tiny job; checks what every job must show."""
    config = JobConfig.from_sources(
        {**SIZES, "address": address, "run_dir": str(run_dir), **settings}
    )
    result = run_job(config)
    assert not result.interrupted
    assert len(result.history) == config.total_updates
    for line in result.history:
        for name in ("reward", "loss", "grad_norm", "tokens_per_second", "staleness"):
            assert math.isfinite(line[name]), (name, line[name])
        assert line["grad_norm"] > 0 or not learns_every_step
    for name in ("config.yaml", "metrics.jsonl", "report.html"):
        assert (run_dir / name).stat().st_size > 0
    return result
