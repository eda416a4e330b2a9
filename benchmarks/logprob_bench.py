"""`python -m benchmarks.logprob_bench`: log-probs and the LM head against the floor and against others.

Every number is a ratio within this run: candidates take turns, each is repeated, the best of each counts.
Writes `benchmarks/results.md`. With `--with-peers` it first puts verl, trl and liger-kernel into an environment of
their own on top of this one (see `peer_environment`).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks import candidates, peer_environment, report
from benchmarks.lm_head_bench import measure_lm_head
from benchmarks.measure import (
    MODES,
    Candidate,
    Mode,
    Seconds,
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


class Case(NamedTuple):
    """One shape; `modes` is what is measured on it."""

    rows: int
    columns: int
    dtype: str
    ranks: int
    modes: tuple[Mode, ...]


def all_cases(quick: bool) -> list[Case]:
    """The case of the targets first, then the grid."""
    if quick:
        return [Case(64, 20_000, "float32", ranks, MODES) for ranks in (1, 2)]
    grid = [
        Case(rows, columns, dtype, ranks, MODES)
        for ranks in (1, 2)
        for rows, columns in ((512, 151_936), (4096, 32_768))
        for dtype in ("float32", "bfloat16")
    ]
    return [Case(384, 151_936, "float32", 1, MODES), *grid]


def measure_case(group: dist.ProcessGroup, case: Case, repeats: int) -> dict[str, Any]:
    """All candidates on one shape. Runs on every rank; the slowest rank counts."""
    peers, absent = load_peers()
    everything = {**OWN, **peers}
    rows: list[dict[str, Any]] = []
    for mode in case.modes:
        work = make_workload(case.rows, case.columns, getattr(torch, case.dtype), mode, group)
        able = {
            name: candidate
            for name, (candidate, modes, shards) in everything.items()
            if mode in modes and (shards or case.ranks == 1)
        }
        rows += _measure_candidates(able, work, repeats)
    return {"case": case._asdict(), "rows": rows, "absent": absent}


def _measure_candidates(
    able: dict[str, Candidate], work: Any, repeats: int
) -> list[dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    logits_bytes = work.original.numel() * work.original.element_size()
    for (
        name,
        candidate,
    ) in able.items():  # the first run compiles; the second is measured for memory
        _, outputs = run_once(candidate, work)
        errors = errors_against_float64(work, outputs)
        del outputs
        extra = peak_extra_bytes(lambda candidate=candidate: run_once(candidate, work))
        results[name] = {"name": name, "errors": errors, "memory": extra / logits_bytes}
    never = Seconds(float("inf"), float("inf"))
    times: dict[str, Seconds] = dict.fromkeys(able, never)
    floor = float("inf")
    for _ in range(repeats):
        for name, candidate in able.items():
            seconds, _ = run_once(candidate, work)
            slowest = [_slowest(value, work.group) for value in seconds]
            times[name] = Seconds(*map(min, times[name], slowest))
        floor = min(floor, _slowest(floor_seconds(work), work.group))
    common = {"mode": work.mode, "floor": floor}
    return [
        {
            **results[name],
            **common,
            "seconds": times[name].wall,
            "processor_seconds": times[name].processor,
        }
        for name in able
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


def _slowest(seconds: float, group: dist.ProcessGroup) -> float:
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return value.item()


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--repeats", type=int, default=5, help="runs of each candidate; the best counts"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small shapes, to see that everything runs"
    )
    parser.add_argument(
        "--with-peers", action="store_true", help="install and include verl, trl, liger"
    )
    parser.add_argument("--only-targets", action="store_true", help="only the shape of the targets")
    parser.add_argument("--skip-lm-head", action="store_true", help="leave out the fused LM head")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("results.md"))
    options = parser.parse_args(arguments)
    if options.with_peers:
        return peer_environment.run_inside("benchmarks.logprob_bench", _without_flag(arguments))
    started = time.time()
    cases = []
    chosen = all_cases(options.quick)
    for case in chosen[:1] if options.only_targets else chosen:
        print(f"measuring {case}", file=sys.stderr, flush=True)
        cases.append(
            run_in_ranks(
                measure_case,
                (case, options.repeats),
                ranks=case.ranks,
                threads=max(1, THREADS // case.ranks),
                seconds=1800,
            )
        )
    shapes = [(rows, columns) for rows in (64, 256, 1024) for columns in (8192, 32_768, 151_936)]
    growth = [
        row
        for ranks in (1, 2)
        for row in run_in_ranks(
            measure_growth,
            (shapes[:2] if options.quick or options.only_targets else shapes, options.repeats),
            ranks=ranks,
            threads=1,  # one per rank, so that a second rank brings a second core
            seconds=1800,
        )
    ]
    heads = None if options.skip_lm_head else measure_lm_head(options.quick, THREADS)
    text = report.render(
        cases, growth, heads, repeats=options.repeats, seconds=time.time() - started
    )
    options.output.write_text(text)
    print(text)
    return 0


def _without_flag(arguments: list[str] | None) -> list[str]:
    given = sys.argv[1:] if arguments is None else arguments
    return [argument for argument in given if argument != "--with-peers"]


if __name__ == "__main__":
    sys.exit(main())
