"""Time, peak memory and error of one candidate, and the floor that memory bandwidth sets."""

from __future__ import annotations

import ctypes
import gc
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

Mode = Literal["log_prob", "entropy_metric", "entropy_grad"]
MODES: tuple[Mode, ...] = ("log_prob", "entropy_metric", "entropy_grad")

# logits [T, V/tp], tokens [T], group, mode -> log_probs [T], entropy [T] or None
Candidate = Callable[
    [torch.Tensor, torch.Tensor, dist.ProcessGroup | None, Mode],
    tuple[torch.Tensor, torch.Tensor | None],
]


class Workload(NamedTuple):
    """One rank's share of a log-prob computation; `original` restores logits that a candidate destroyed."""

    original: torch.Tensor  # [T, V/tp]
    logits: torch.Tensor  # [T, V/tp], a leaf that requires a gradient
    tokens: torch.Tensor  # [T]
    weights: torch.Tensor  # [2, T], the gradients that arrive at log-probs and entropy
    group: dist.ProcessGroup | None
    mode: Mode


def make_workload(
    rows: int, columns: int, dtype: torch.dtype, mode: Mode, group: dist.ProcessGroup | None
) -> Workload:
    """Random logits of a plausible spread; every rank draws the same tokens and its own columns."""
    shared = torch.Generator().manual_seed(rows)
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    tokens = torch.randint(columns, (rows,), generator=shared)
    weights = torch.randn(2, rows, generator=shared) / rows
    own = torch.Generator().manual_seed(1000 + rank)
    original = torch.randn(rows, columns // size, generator=own).mul_(2.5).to(dtype)
    logits = original.clone().requires_grad_()
    return Workload(original, logits, tokens, weights, group, mode)


class Seconds(NamedTuple):
    """Elapsed time, and processor time of all threads, which waiting for a busy machine does not lengthen."""

    wall: float
    processor: float


def run_once(candidate: Candidate, work: Workload) -> tuple[Seconds, list[torch.Tensor | None]]:
    """Time of one forward and backward pass, and log-probs, entropy and gradient."""
    with torch.no_grad():
        work.logits.copy_(work.original)
    if work.group is not None:
        dist.barrier(work.group)
    start, start_processor = time.perf_counter(), time.process_time()
    log_probs, entropy = candidate(work.logits, work.tokens, work.group, work.mode)
    total = torch.dot(log_probs.float(), work.weights[0])
    if work.mode == "entropy_grad" and entropy is not None:
        total = total + torch.dot(entropy.float(), work.weights[1])
    (grad,) = torch.autograd.grad(total, work.logits)
    wall, processor = time.perf_counter() - start, time.process_time() - start_processor
    return Seconds(wall, processor), [log_probs, entropy, grad]


def peak_extra_bytes(action: Callable[[], object]) -> int:
    """Growth of the resident set while `action` runs, from the kernel's own high-water mark."""
    gc.collect()
    _return_free_memory()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark to the present size
    before = _status_bytes("VmRSS")
    action()
    return max(0, _status_bytes("VmHWM") - before)


def floor_seconds(work: Workload, repeats: int = 5) -> float:
    """One read forward, one read and one write backward: one and a half copies between existing buffers."""
    into = torch.empty_like(work.original).copy_(work.original)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        into.copy_(work.original)
        best = min(best, time.perf_counter() - start)
    return 1.5 * best


def errors_against_float64(
    work: Workload, results: list[torch.Tensor | None], rows: int = 64
) -> dict[str, float]:
    """Largest absolute error of the first `rows` rows; the gradient's in units of its row's incoming weight."""
    if work.group is not None and dist.get_world_size(work.group) > 1:
        return {}
    exact = work.original[:rows].double().requires_grad_()
    log_soft = torch.log_softmax(exact, dim=-1)
    log_probs = log_soft.gather(-1, work.tokens[:rows, None])[:, 0]
    entropy = -(log_soft.exp() * log_soft).sum(-1)
    weights = work.weights[:, :rows].double()
    total = log_probs @ weights[0]
    if work.mode == "entropy_grad":
        total = total + entropy @ weights[1]
    (grad,) = torch.autograd.grad(total, exact)
    expected = {"log_prob": log_probs, "entropy": entropy, "gradient": grad}
    found: dict[str, float] = {}
    for (name, value), result in zip(expected.items(), results, strict=True):
        if result is not None:
            difference = (result[:rows].double() - value).abs()
            if name == "gradient":
                difference = difference / weights.abs().sum(0)[:, None]
            found[name] = difference.max().item()
    return found


def _return_free_memory() -> None:
    """What the allocator kept of earlier work would be used again without the resident set growing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    match = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    return 0 if match is None else int(match[1]) * 1024
