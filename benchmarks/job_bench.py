"""Whole steps of a job: against TRL's GRPOTrainer, and how their cost grows with samples, ranks and length.

Ours and TRL's start from the same weights and train on the same prompts with the same reward, batch, microbatches,
lengths and optimizer settings, on the same cores. They take turns, and the median of the steps that count is compared.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.job_task import Model, write_model
from benchmarks.job_worker import JobSpec
from benchmarks.peer_environment import ROOT

SAMPLES_PER_PROMPT = 8
_ROUND_SECONDS = 900.0
_QUICK_START = Model(hidden=64, layers=2, heads=4)


class Size(NamedTuple):
    """A model, and the batch that it is trained on."""

    name: str
    model: Model
    prompts: int
    response: int
    microbatch: int
    lr: float
    rounds: int
    steps: int


def all_sizes(quick: bool) -> list[Size]:
    """The quick start's, and two larger ones; of the largest, few prompts, or a step would take minutes."""
    if quick:
        wide = Model(hidden=128, layers=2, heads=4, vocabulary=1024)
        return [
            Size("quick start", _QUICK_START, 8, 8, 16, 3e-3, 2, 3),
            Size("hidden 128, 2 layers, vocabulary 1,024", wide, 2, 16, 8, 1e-4, 1, 2),
        ]
    middle = Model(hidden=256, layers=4, heads=4)
    large = Model(hidden=512, layers=8, heads=8, vocabulary=32_768)
    return [
        Size("quick start", _QUICK_START, 64, 8, 256, 3e-3, 3, 6),
        Size("hidden 256, 4 layers", middle, 64, 64, 64, 1e-3, 2, 3),
        Size("hidden 512, 8 layers, vocabulary 32,768", large, 2, 128, 8, 1e-4, 2, 3),
    ]


def measure_jobs(quick: bool) -> dict[str, Any]:
    """Seconds of a step and of its phases, for every size: ours and TRL's.

    Ours: synchronous with one rank and one engine, the same with one of each per core, and asynchronous.
    """
    missing = [
        name for name in ("trl", "accelerate", "datasets") if not importlib.util.find_spec(name)
    ]
    found = []
    for size in all_sizes(quick):
        rows = _take_turns(size, with_trl=not missing)
        found.append({"size": size._asdict() | {"model": size.model._asdict()}, "rows": rows})
    return {
        "samples_per_prompt": SAMPLES_PER_PROMPT,
        "cores": len(os.sched_getaffinity(0)),
        "sizes": found,
        "absent": [f"TRL's jobs: {', '.join(missing)} not installed"] if missing else [],
    }


def _take_turns(size: Size, *, with_trl: bool) -> list[dict[str, Any]]:
    """Start the jobs of a size one after the other, then let one at a time work for a round."""
    kinds = ("synchronous", "rank per core", "asynchronous", *(("TRL",) if with_trl else ()))
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="job_bench_") as root, ExitStack() as cleanup:
        model = Path(root) / "model"
        write_model(size.model, size.response + 128, model)
        jobs = []
        for kind in kinds:
            directory = Path(root) / kind
            spec = JobSpec(
                kind,
                str(directory),
                str(model),
                size.prompts,
                SAMPLES_PER_PROMPT,
                size.response,
                size.microbatch,
                size.lr,
                size.rounds,
                size.steps,
                *((cores, cores) if kind == "rank per core" else ()),
            )
            started = time.monotonic()
            jobs.append(Job(spec))
            cleanup.callback(jobs[-1].close)
            jobs[-1].wait_for_round(0)
            _progress(f"{size.name}: {kind}, first step after {time.monotonic() - started:.0f} s")
        for number in range(1, size.rounds + 1):
            for job in jobs:
                job.begin_round(number)
                job.wait_for_round(number)
                _progress(
                    f"{size.name}: {job.spec.kind}, round {number}, {job.last_seconds():.2f} s a step"
                )
        for job in jobs:
            job.finish()
        return [job.summary() for job in jobs]


class Job:
    """A job in a process of its own; see `job_worker` for how it is held and let go."""

    def __init__(self, spec: JobSpec, python: str = sys.executable) -> None:
        self.spec = spec
        self._directory = Path(spec.directory)
        self._directory.mkdir()
        file = self._directory / "spec.json"
        file.write_text(json.dumps(spec._asdict()))
        self._log = self._directory / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.job_worker", str(file)],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
            )

    def begin_round(self, number: int) -> None:
        """Let the job go on after round `number - 1`."""
        (self._directory / f"go-{number - 1}").touch()

    def wait_for_round(self, number: int) -> None:
        """Return when the job has ended a round and waits."""
        deadline = time.monotonic() + _ROUND_SECONDS
        while not (self._directory / f"done-{number}").exists():
            ended = self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                what = "ended early" if ended else f"took longer than {_ROUND_SECONDS:g} s"
                raise RuntimeError(f"{self.spec.kind} job {what}:\n{self._log.read_text()[-4000:]}")
            time.sleep(0.02)

    def finish(self) -> None:
        """Let the job end after its last round."""
        self.begin_round(self.spec.rounds + 1)
        if self._process.wait(timeout=_ROUND_SECONDS) != 0:
            raise RuntimeError(f"{self.spec.kind} job failed:\n{self._log.read_text()[-4000:]}")

    def close(self) -> None:
        """End the job if it has not ended."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def last_seconds(self) -> float:
        """Seconds of the latest step."""
        return float(self._steps()[-1]["seconds"])

    def summary(self) -> dict[str, Any]:
        """Medians of the steps that count, and the reward of the first and the last step."""
        steps = self._steps()
        counted = [step for step in steps if step["counts"]]
        names = counted[0]["phases"]
        return {
            "kind": self.spec.kind,
            "steps": len(counted),
            "seconds": statistics.median(step["seconds"] for step in counted),
            "range": [pick(step["seconds"] for step in counted) for pick in (min, max)],
            "phases": {
                name: statistics.median(step["phases"][name] for step in counted) for name in names
            },
            "tokens": counted[-1]["tokens"],
            "rewards": [steps[0]["reward"], steps[-1]["reward"]],
        }

    def _steps(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self._directory / "steps.jsonl").open()]


class Growth(NamedTuple):
    """One axis of growth of whole jobs: what differs from the quick start, and the steps that are timed."""

    axis: str
    prompts: int = 64
    response: int = 8
    ranks: int = 1
    steps: int = 4


def all_growths(quick: bool) -> list[Growth]:
    """Each axis to its end; the first is where all of them start."""
    if quick:
        return [Growth("start", 8), Growth("ranks", 8, ranks=2)]
    return [
        Growth("start"),
        Growth("samples", prompts=2048, steps=2),
        Growth("length", response=128, steps=2),
        Growth("ranks", ranks=2),
        Growth("ranks", ranks=4),
    ]


def measure_job_growth(quick: bool) -> dict[str, Any]:
    """What grows in whole jobs, and on the driver alone, where larger numbers fit."""
    samples = (64, 256) if quick else (64, 256, 1024, 4096, 16_384)
    lengths = (8, 64) if quick else (8, 128, 1024)
    ranks = (1, 2, 4) if quick else (1, 2, 4, 8, 16, 32, 64)
    repeats = 2 if quick else 5
    driver = []
    for axis, shapes in {
        "samples": [(count, 8, 1) for count in samples],
        "length": [(512, length, 1) for length in lengths],
        "ranks": [(samples[-2], 64, size) for size in ranks],
    }.items():
        for count, length, size in shapes:
            row = _driver_costs(count, length, size, repeats)
            driver.append({"axis": axis, "samples": count, "length": length, "ranks": size, **row})
        _progress(f"growth on the driver: {axis}")
    return {"driver": driver, "jobs": [_grown_job(growth) for growth in all_growths(quick)]}


def _grown_job(growth: Growth) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="job_bench_") as root, ExitStack() as cleanup:
        model = Path(root) / "model"
        write_model(_QUICK_START, growth.response + 128, model)
        job = Job(
            JobSpec(
                "synchronous",
                str(Path(root) / "job"),
                str(model),
                growth.prompts,
                SAMPLES_PER_PROMPT,
                growth.response,
                64,
                3e-3,
                rounds=1,
                steps=growth.steps,
                ranks=growth.ranks,
            )
        )
        cleanup.callback(job.close)
        for number in (0, 1):
            job.wait_for_round(number)
            job.begin_round(number + 1)
        _progress(f"growth of a job: {growth._asdict()}, {job.last_seconds():.2f} s a step")
        job.finish()
        return growth._asdict() | {"samples": growth.prompts * SAMPLES_PER_PROMPT} | job.summary()


def _driver_costs(samples: int, length: int, ranks: int, repeats: int) -> dict[str, Any]:
    """Best seconds of preparing a batch, of cutting it, and of one rank's unpacking; and what one rank gets."""
    answers = _answers(samples, length)
    found = [_driver_pass(answers, ranks) for _ in range(repeats)]
    return {name: min(row[name] for row in found) for name in found[0]}


def _answers(samples: int, length: int) -> list[list[Any]]:
    """Responses of `length` tokens to prompts of 4, as an engine's trajectories, one list per prompt."""
    import torch

    from plugin.batch_types import RolloutSample
    from plugin.environments.trajectory import Trajectory

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(15, (samples, length + 4), generator=generator)
    log_probs = -torch.rand(samples, length, generator=generator)
    trajectories = [
        Trajectory(
            (
                RolloutSample(
                    tokens[i],
                    length,
                    torch.ones(length, dtype=torch.int64),
                    rollout_log_probs=log_probs[i],
                ),
            ),
            reward=i % 5 / 4,
        )
        for i in range(samples)
    ]
    starts = range(0, samples, SAMPLES_PER_PROMPT)
    return [trajectories[start : start + SAMPLES_PER_PROMPT] for start in starts]


def _driver_pass(answers: Sequence[Sequence[Any]], ranks: int) -> dict[str, float]:
    """The one place that follows the way of a batch from the engines' answers to a rank's microbatches."""
    from plugin.cluster.array_transport import from_arrays, to_arrays
    from plugin.config import JobConfig
    from plugin.controller.batch import describe_batch, prepare_batch
    from plugin.environments.trajectory import Rollouts
    from plugin.megatron_backend.step.batch_share import BatchShare, cut_share, plan_batch
    from plugin.megatron_backend.step.loss_scaling import total_weight

    config = JobConfig.from_sources({"micro_batch_size": 64})
    rollouts = Rollouts.of(answers)
    start = time.perf_counter()
    batch = prepare_batch(config, rollouts)
    describe_batch(config, batch, rollouts, 0)
    prepared = time.perf_counter()
    plan = plan_batch(
        batch, config, dp_size=ranks, cp_size=1, round_size=1, hidden_size=64, longest=10**6
    )
    weight = total_weight(batch, per_token=config.per_token)
    shares = [to_arrays(cut_share(batch, plan, rank, weight=weight)) for rank in range(ranks)]
    cut = time.perf_counter()
    from_arrays(BatchShare, shares[0]).microbatches()
    return {
        "preparing": prepared - start,
        "cutting": cut - prepared,
        "rank": time.perf_counter() - cut,
        "rank_bytes": sum(array.nbytes for array in shares[0].values()),
    }


def _progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)
