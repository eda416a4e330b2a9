"""Log-probs and entropy, forward and backward, against the floor and against others.

Candidates take turns, each is repeated, the best of each counts. Verl, trl and liger-kernel take part where they can be
imported (see `peer_environment`).
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks import candidates
from benchmarks.measure import (
    MODES,
    Candidate,
    Mode,
    Seconds,
    Workload,
    errors_against_float64,
    floor_seconds,
    make_workload,
    peak_extra_bytes,
    run_once,
)
from benchmarks.peers import load_peers
from benchmarks.workers import run_in_ranks

THREADS = 2
ALL_MODES: tuple[Mode, ...] = MODES
# name -> (candidate, modes it knows, whether it runs on a sharded vocabulary)
OWN: dict[str, tuple[Candidate, tuple[Mode, ...], bool]] = {
    "ours, in place": (candidates.ours_in_place, ALL_MODES, True),
    "ours": (candidates.ours, ALL_MODES, True),
    "ours, no compiler, in place": (candidates.ours_without_compiler, ALL_MODES, True),
    "eager log_softmax": (candidates.eager, ALL_MODES, False),
    "torch.compile, plain formula": (candidates.compiled_plain, ALL_MODES, False),
    "torch.compile, two passes, in place": (candidates.compiled_passes, ALL_MODES, False),
    "saved softmax": (candidates.saved_softmax, ALL_MODES, True),
}


# Compiling takes longer than measuring; the shape of the targets shows it.
ONLY_FOR_TARGETS = ("torch.compile, two passes, in place",)
# A candidate that is many times slower than the others is repeated less often, but at least twice.
SECONDS_PER_CANDIDATE = {"targets": 8.0, "grid": 1.5}
REPEATS = {"targets": 9, "grid": 5}


class Case(NamedTuple):
    """One shape; `purpose` decides how often candidates are repeated."""

    rows: int
    columns: int
    dtype: str
    ranks: int
    purpose: str = "grid"


def measure_targets(quick: bool) -> list[dict[str, Any]]:
    """The shape that the targets are stated for."""
    shape = (64, 20_000) if quick else (384, 151_936)
    return [_in_ranks(Case(*shape, "float32", 1, "targets"))]


def measure_cases(quick: bool) -> list[dict[str, Any]]:
    """Shapes x dtypes x ranks."""
    shapes = ((64, 20_000),) if quick else ((512, 151_936), (4096, 32_768))
    return [
        _in_ranks(Case(rows, columns, dtype, ranks))
        for ranks in (1, 2)
        for rows, columns in shapes
        for dtype in ("float32", "bfloat16")
    ]


def measure_growths(quick: bool) -> list[dict[str, Any]]:
    """Growth with rows, columns and ranks, one thread per rank, so that a second rank brings a second core."""
    shapes = [(rows, columns) for rows in (64, 256, 1024) for columns in (8192, 32_768, 151_936)]
    shapes = shapes[:2] if quick else shapes
    return [
        row
        for ranks in (1, 2)
        for row in run_in_ranks(measure_growth, (shapes, 5), ranks=ranks, threads=1, seconds=1800)
    ]


def _in_ranks(case: Case) -> dict[str, Any]:
    print(f"  {case}", file=sys.stderr, flush=True)
    threads = max(1, THREADS // case.ranks)
    return run_in_ranks(measure_case, (case,), ranks=case.ranks, threads=threads, seconds=1800)


def measure_case(group: dist.ProcessGroup, case: Case) -> dict[str, Any]:
    """All candidates on one shape. Runs on every rank; the slowest rank counts."""
    peers, absent = load_peers()
    everything = {**OWN, **peers}
    rows: list[dict[str, Any]] = []
    for mode in MODES:
        work = make_workload(case.rows, case.columns, getattr(torch, case.dtype), mode, group)
        able = {
            name: candidate
            for name, (candidate, modes, shards) in everything.items()
            if mode in modes
            and (shards or case.ranks == 1)
            and (case.purpose == "targets" or name not in ONLY_FOR_TARGETS)
        }
        rows += _measure_candidates(able, work, case.purpose)
    return {"case": case._asdict(), "rows": rows, "absent": absent}


class _Measured:
    """What is known of a candidate so far."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate
        self.errors: dict[str, float] = {}
        self.memory = float("inf")
        self.times = Seconds(float("inf"), float("inf"))
        self.runs, self.spent = 0, 0.0

    def wants_more(self, purpose: str) -> bool:
        enough = self.runs >= REPEATS[purpose] or self.spent > SECONDS_PER_CANDIDATE[purpose]
        return self.runs < 2 or not enough

    def run(self, work: Workload) -> None:
        """One more timed run; the growth of the resident set is read around it."""
        found: list[Seconds] = []
        extra = peak_extra_bytes(lambda: found.append(run_once(self.candidate, work)[0]))
        slowest = Seconds(*(_slowest(value, work.group) for value in found[0]))
        self.times = Seconds(*map(min, self.times, slowest))
        self.memory = min(
            self.memory, extra / (work.original.numel() * work.original.element_size())
        )
        self.runs, self.spent = self.runs + 1, self.spent + slowest.wall


def _measure_candidates(
    able: dict[str, Candidate], work: Workload, purpose: str
) -> list[dict[str, Any]]:
    measured = {name: _Measured(candidate) for name, candidate in able.items()}
    for one in measured.values():  # the first run compiles
        outputs = run_once(one.candidate, work)[1]
        one.errors = errors_against_float64(work, outputs)
    floor = float("inf")
    for _ in range(REPEATS[purpose]):
        for one in measured.values():
            if one.wants_more(purpose):
                one.run(work)
        floor = min(floor, _slowest(floor_seconds(work), work.group))
    return [
        {
            "name": name,
            "errors": one.errors,
            "memory": one.memory,
            "mode": work.mode,
            "floor": floor,
            "seconds": one.times.wall,
            "processor_seconds": one.times.processor,
        }
        for name, one in measured.items()
    ]


def measure_growth(
    group: dist.ProcessGroup, shapes: list[tuple[int, int]], repeats: int
) -> list[dict[str, Any]]:
    """Seconds of ours, in place, on several shapes in float32 with the entropy's gradient."""
    found = []
    for rows, columns in shapes:
        work = make_workload(rows, columns, torch.float32, "entropy_grad", group)
        run_once(candidates.ours_in_place, work)
        best = min(
            _slowest(run_once(candidates.ours_in_place, work)[0].wall, group)
            for _ in range(repeats)
        )
        found.append({"rows": rows, "columns": columns, "ranks": group.size(), "seconds": best})
    return found


def _slowest(seconds: float, group: dist.ProcessGroup | None) -> float:
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return value.item()
