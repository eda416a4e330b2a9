"""Log-probs and entropy, forward and backward, against the floor and against others.

Candidates take turns, each is repeated, the best of each counts. Verl, trl and liger-kernel take part where they can be
imported (see `peer_environment`). `python -m benchmarks.logprob_bench` times each pass of ours by itself instead.
"""

from __future__ import annotations

import sys
import time
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
from plugin.logprobs.kernels import RowNormalizer, row_kernels_for

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


def measure_passes(dtype: torch.dtype, rows: int, columns: int, repeats: int) -> dict[str, float]:
    """Seconds of each pass alone, in turns: the least of `repeats`; `copy` reads and writes once."""
    logits = torch.randn(rows, columns).mul_(2.5).to(dtype)
    tokens, grads = torch.randint(columns, (rows,)), torch.randn(2, rows)
    kernels, into = row_kernels_for(logits), torch.empty_like(logits)
    sums = kernels.forward_blocks(logits, tokens, scale=1.0, with_entropy=True)
    assert sums.weighted_sum is not None
    entropy = sums.sum_exp.log() - sums.weighted_sum / sums.sum_exp
    normalizer = RowNormalizer(sums.maximum, sums.sum_exp, entropy)

    def forward(with_entropy: bool) -> None:
        kernels.forward_blocks(logits, tokens, scale=1.3, with_entropy=with_entropy)

    def backward(out: torch.Tensor, of_entropy: torch.Tensor | None) -> None:
        source = logits if out is into else out
        kernels.backward_blocks(
            source, tokens, normalizer, grads[0], of_entropy, scale=1.3, out=out
        )

    inside = logits.clone()
    passes = {
        "copy": lambda: into.copy_(logits),
        "copy, fresh": lambda: torch.empty_like(logits).copy_(logits),
        "forward": lambda: forward(False),
        "forward with entropy": lambda: forward(True),
        "backward": lambda: backward(into, None),
        "backward of entropy": lambda: backward(into, grads[1]),
        "backward, in place": lambda: backward(inside, None),
        "backward of entropy, in place": lambda: backward(inside, grads[1]),
        "backward, fresh": lambda: kernels.backward_blocks(
            logits, tokens, normalizer, grads[0], None, scale=1.3, out=torch.empty_like(logits)
        ),
    }
    least = dict.fromkeys(passes, float("inf"))
    for _ in range(repeats):
        inside.copy_(logits)
        for name, run in passes.items():
            start = time.perf_counter()
            run()
            least[name] = min(least[name], time.perf_counter() - start)
    return least


def main() -> None:
    """Print every pass in units of its floor, and of the same pass over a few rows in the cache."""
    print("| dtype | pass | nanoseconds per logit | x floor | x the same in cache |")
    print("|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        large, small = (256, 151_936), (2, 151_936)
        seconds, cached = (
            measure_passes(dtype, *shape, repeats=repeats)
            for shape, repeats in ((large, 9), (small, 200))
        )
        for name, value in seconds.items():
            reads = 0.5 if name.startswith("forward") else 1.0
            in_cache = cached[name] * large[0] / small[0]
            print(
                f"| {dtype} | {name} | {value / large[0] / large[1] * 1e9:.3f} "
                f"| {value / (reads * seconds['copy']):.2f} | {value / in_cache:.2f} |"
            )


if __name__ == "__main__":
    main()
