"""Whole steps on SmolLM2-135M-Instruct against TRL's GRPOTrainer: `python -m benchmarks.real_jobs`.

Both sides have the same weights, prompts, reward, batch, sampling and optimizer settings, on the same cores. TRL's job
stays open; between two of its steps one of ours starts, takes its steps and ends: ours, theirs, ours, theirs. Prints a
table, and puts it into docs/performance.md unless --quick.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import peer_environment
from benchmarks.job_bench import Job
from benchmarks.job_worker import JobSpec
from benchmarks.marked_pages import write_marked
from benchmarks.peer_environment import ROOT

MODEL = ROOT / "runs" / "real_model" / "model"
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
PAGE = ROOT / "docs" / "performance.md"
DTYPES = ("float32", "bfloat16")
#: Of ours: when rollouts are generated, and by which engine.
KINDS = (
    ("synchronous", "transformers"),
    ("asynchronous", "transformers"),
    ("synchronous", "vllm"),
    ("asynchronous", "vllm"),
)
SAMPLES_PER_PROMPT = 8
#: TRL's microbatch, about as many tokens as ours by default on a CPU.
TRL_MICROBATCH = 32
LEARNING_RATE = 2e-5


class Batch(NamedTuple):
    """What a step trains on, and how many of our steps are timed."""

    prompts: int = 8
    response: int = 24
    steps: int = 2


def measure(
    dtypes: Sequence[str], kinds: Sequence[tuple[str, str]], batch: Batch
) -> dict[str, Any]:
    """Medians of our steps of each kind, and of TRL's, of which one follows each of our jobs."""
    with tempfile.TemporaryDirectory(prefix="real_jobs_") as root:
        rows_file = Path(root) / "rows.jsonl"
        count = batch.prompts * (2 + max(batch.steps + 1, len(kinds)))
        rows_file.write_text("".join(json.dumps(row) + "\n" for row in sums(count)))
        found = [
            row | {"dtype": dtype}
            for dtype in dtypes
            for row in _against_trl(Path(root) / dtype, rows_file, dtype, kinds, batch)
        ]
    return {
        "rows": found,
        "cores": len(os.sched_getaffinity(0)),
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def sums(count: int) -> Iterator[dict[str, Any]]:
    """Sums in the words of examples/real_model."""
    from examples.real_model.make_data import messages

    draw = random.Random(1234)
    for _ in range(count):
        left, right = draw.randrange(1, 100), draw.randrange(1, 100)
        question = f"State the final answer to the following arithmetic problem: {left} + {right} ="
        yield {"messages": messages(question), "answer": str(left + right)}


def _against_trl(
    root: Path, rows: Path, dtype: str, kinds: Sequence[tuple[str, str]], batch: Batch
) -> list[dict[str, Any]]:
    root.mkdir()

    def spec(kind: Any, engine: str, rounds: int, steps: int) -> JobSpec:
        return JobSpec(
            kind,
            str(root / f"{kind}-{engine}"),
            str(MODEL),
            batch.prompts,
            SAMPLES_PER_PROMPT,
            batch.response,
            min(TRL_MICROBATCH, batch.prompts * SAMPLES_PER_PROMPT),
            LEARNING_RATE,
            rounds,
            steps,
            dtype=dtype,
            engine=engine,
            rows=str(rows),
        )

    found = []
    with _started(spec("TRL", "transformers", len(kinds), 1), sys.executable) as peer:
        for turn, (kind, engine) in enumerate(kinds, start=1):
            python = str(VLLM_PYTHON) if engine == "vllm" else sys.executable
            with _started(spec(kind, engine, 1, batch.steps + 1), python) as job:
                _take_round(job, 1)
                job.finish()
                found.append(job.summary() | {"engine": engine})
            _take_round(peer, turn)
        peer.finish()
        return [*found, peer.summary() | {"engine": "transformers"}]


@contextmanager
def _started(spec: JobSpec, python: str) -> Iterator[Job]:
    """A job after its first step, which compiles and starts what is left to start."""
    started = time.monotonic()
    job = Job(spec, python)
    try:
        job.wait_for_round(0)
        seconds = time.monotonic() - started
        _progress(f"{_name(spec)}: first step after {seconds:.0f} s")
        yield job
    finally:
        job.close()


def _take_round(job: Job, number: int) -> None:
    job.begin_round(number)
    job.wait_for_round(number)
    _progress(f"{_name(job.spec)}: {job.last_seconds():.1f} s a step")


def _name(spec: JobSpec) -> str:
    return f"{spec.dtype}, {spec.kind}, {spec.engine}"


def table(data: dict[str, Any]) -> str:
    """Markdown: a row per job."""
    lines = [
        f"Measured {data['made']} on {data['cores']} cores; medians of whole steps.\n",
        "| precision | job | engine | seconds | speed, TRL = 1 | least to most | waiting | training | tokens | reward |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        peer = next(
            one["seconds"]
            for one in data["rows"]
            if one["kind"] == "TRL" and one["dtype"] == row["dtype"]
        )
        low, high = row["range"]
        waiting, training = (row["phases"].get(name) for name in ("waiting", "training"))
        lines.append(
            f"| {row['dtype']} | {row['kind']} | {row['engine']} | {row['seconds']:.1f} | {peer / row['seconds']:.2f}x "
            f"| {low:.1f} to {high:.1f} | {waiting:.1f} | {'-' if training is None else f'{training:.1f}'} "
            f"| {row['tokens']} | {row['rewards'][-1]:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--engines", nargs="+", choices=("transformers", "vllm"), default=None)
    parser.add_argument(
        "--quick", action="store_true", help="a small batch, to see that all runs; the page stays"
    )
    options = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        inside = Path(sys.prefix) == peer_environment.DIRECTORY
        if inside:
            print("trl could not be installed; see benchmarks/peer_requirements.txt")
            return 1
        return peer_environment.run_inside("benchmarks.real_jobs", sys.argv[1:])
    for path, target in ((MODEL, "runs/real_model/model"), (VLLM_PYTHON, ".venv-vllm/ready")):
        if not path.exists():
            print(f"{path} is missing: make {target}")
            return 1
    kinds = [kind for kind in KINDS if options.engines is None or kind[1] in options.engines]
    data = measure(options.dtypes, kinds, Batch(2, 8, 1) if options.quick else Batch())
    text = table(data)
    print(text)
    if not options.quick:
        write_marked(PAGE, "real jobs", text)
    return 0


def _progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
