"""`python -m benchmarks`: every part in turn, or `--only NAME ...`; all of them end up in one `results.md`.

A part's measurements are kept in `results.json`, so that parts can be made one at a time in quiet windows; the
report says when and for how long each of them ran. Every number is a ratio within its part's run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import peer_environment, report
from benchmarks.batching_bench import measure_batching
from benchmarks.generation_bench import measure_generation
from benchmarks.gpu_kernels import measure_gpu_kernels
from benchmarks.job_bench import measure_job_growth, measure_jobs
from benchmarks.lm_head_bench import measure_lm_head
from benchmarks.logprob_bench import measure_cases, measure_growths, measure_targets
from benchmarks.profile_bench import measure_profile
from benchmarks.sampling_mask_bench import measure_sampling_mask
from benchmarks.step_bench import measure_batch_statistics, measure_steps
from benchmarks.weight_sync_bench import measure_weight_sync

# name -> what it measures; each takes whether to use small shapes
PARTS: dict[str, Callable[[bool], Any]] = {
    "targets": measure_targets,
    "profile": measure_profile,
    "growth": measure_growths,
    "lm-head": measure_lm_head,
    "sampling-mask": measure_sampling_mask,
    "steps": measure_steps,
    "batch-statistics": measure_batch_statistics,
    "batching": measure_batching,
    "generation": measure_generation,
    "weight-sync": measure_weight_sync,
    "jobs": measure_jobs,
    "job-growth": measure_job_growth,
    "gpu-kernels": measure_gpu_kernels,
    "grid": measure_cases,
}


def main(arguments: list[str] | None = None) -> int:
    """Measure the chosen parts, then write the report of everything measured so far."""
    given = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(given)
    if options.with_peers:
        rest = [argument for argument in given if argument != "--with-peers"]
        return peer_environment.run_inside("benchmarks", rest)
    kept = options.output.with_suffix(".json")
    measured = json.loads(kept.read_text()) if kept.exists() else {}
    for name in options.only or PARTS:
        started, load = time.time(), os.getloadavg()[0]
        _log(f"{name}: started, load {load:.1f}")
        data = PARTS[name](options.quick)
        measured[name] = {
            "data": data,
            "seconds": time.time() - started,
            "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "load_before": load,
            "quick": options.quick,
        }
        kept.write_text(json.dumps(measured, indent=1) + "\n")
        _log(f"{name}: {measured[name]['seconds']:.0f} s")
    text = report.render({name: measured[name] for name in PARTS if name in measured})
    options.output.write_text(text)
    print(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="parts to measure")
    parser.add_argument("--quick", action="store_true", help="small shapes, to see that all runs")
    parser.add_argument(
        "--with-peers",
        action="store_true",
        help="install verl, trl and liger-kernel and include them",
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("results.md"))
    return parser


def _log(text: str) -> None:
    print(f"[{datetime.now(UTC):%H:%M:%S}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
