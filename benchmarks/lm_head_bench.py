"""The fused LM head against the ordinary output layer: time, peak memory, and what rows without loss save."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.candidates import eager, ours_in_place
from benchmarks.measure import peak_extra_bytes
from benchmarks.workers import run_in_ranks
from plugin.logprobs.fused_lm_head import fused_log_probs_and_entropy

MIB = 1 << 20
THREADS = 2
# Measured a second time; the others take long and are far from these.
REPEATED = (
    "logits, then ours in place",
    "fused, budget 256 MiB",
    "fused with the loss, budget 256 MiB",
)
Output = tuple[torch.Tensor, torch.Tensor | None]
LmHead = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Output]


class Sizes(NamedTuple):
    """Hidden states `[rows, hidden]`, weight `[columns, hidden]`."""

    rows: int
    columns: int
    hidden: int


def measure_lm_head(quick: bool) -> dict[str, Any]:
    """All LM heads on one shape, in a process of their own."""
    sizes = Sizes(256, 8000, 64) if quick else Sizes(4096, 151_936, 512)
    return run_in_ranks(
        _measure, (sizes, 1 if quick else 2), ranks=1, threads=THREADS, seconds=3600
    )


def _measure(group: dist.ProcessGroup, sizes: Sizes, repeats: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(sizes.rows, sizes.hidden, generator=generator).requires_grad_()
    weight = (
        torch.randn(sizes.columns, sizes.hidden, generator=generator).mul_(0.1).requires_grad_()
    )
    tokens = torch.randint(sizes.columns, (sizes.rows,), generator=generator)
    heads, absent = _heads(sizes.rows)

    def run(head: LmHead) -> float:
        hidden.grad = weight.grad = None
        start = time.perf_counter()
        log_probs, entropy = head(hidden, weight, tokens)
        total = log_probs.sum() if entropy is None else log_probs.sum() + entropy.sum()
        total.backward()
        return time.perf_counter() - start

    memory: dict[str, int] = {}
    times = dict.fromkeys(heads, float("inf"))
    for repeat in range(repeats):
        for name, head in heads.items():
            if repeat > 0 and name not in REPEATED:
                continue
            print(f"  {name}", file=sys.stderr, flush=True)
            hidden.grad = weight.grad = None
            seconds: list[float] = []
            extra = peak_extra_bytes(lambda head=head, seconds=seconds: seconds.append(run(head)))
            times[name] = min(times[name], seconds[0])
            memory[name] = extra if repeat == 0 else min(extra, memory[name])
    gradients = (hidden.numel() + weight.numel()) * 4
    rows = [{"name": name, "seconds": times[name], "bytes": memory[name]} for name in heads]
    return {"sizes": sizes._asdict(), "rows": rows, "absent": absent, "gradient_bytes": gradients}


def _heads(rows: int) -> tuple[dict[str, LmHead], list[str]]:
    heads: dict[str, LmHead] = {
        "logits, then ours in place": lambda h, w, t: ours_in_place(
            h @ w.t(), t, None, "entropy_grad"
        ),
        "logits, then eager log_softmax": lambda h, w, t: eager(h @ w.t(), t, None, "entropy_grad"),
    }
    for megabytes in (32, 256, 1024):
        heads[f"fused, budget {megabytes} MiB"] = _fused(megabytes, None)
    for megabytes in (32, 128, 256):
        heads[f"fused with the loss, budget {megabytes} MiB"] = _with_loss(megabytes, rows, 1.0)
    for share in (0.5, 0.25):
        carry = f"{share:.0%} of the rows carry loss"
        heads[f"fused, budget 256 MiB, {carry}"] = _fused(256, _mask(rows, share))
        heads[f"fused with the loss, budget 256 MiB, {carry}"] = _with_loss(256, rows, share)
    absent = []
    for loader in (_verl, _liger):
        try:
            heads.update(loader())
        except Exception as error:  # an absent peer is a line in the report
            absent.append(f"{loader.__name__[1:]}: {error}")
    return heads, absent


def _fused(megabytes: int, row_mask: torch.Tensor | None) -> LmHead:
    def head(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> Output:
        return fused_log_probs_and_entropy(
            hidden,
            weight,
            tokens,
            entropy_grad=True,
            row_mask=row_mask,
            memory_budget_bytes=megabytes * MIB,
        )

    return head


def _with_loss(megabytes: int, rows: int, share: float) -> LmHead:
    """The sum of log-prob and entropy as a loss: what the others differentiate."""
    from plugin.logprobs.separable_lm_head import separable_lm_head

    picked = _mask(rows, share).nonzero()[:, 0]

    def head(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> Output:
        *_, anchor = separable_lm_head(
            hidden,
            weight,
            tokens[picked],
            lambda block, log_probs, entropy: log_probs + entropy,
            rows=picked,
            memory_budget_bytes=megabytes * MIB,
        )
        return anchor, None

    return head


def _mask(rows: int, share: float) -> torch.Tensor:
    return torch.rand(rows, generator=torch.Generator().manual_seed(1)) < share


def _verl() -> dict[str, LmHead]:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    module = FusedLinearForPPO()
    return {"verl FusedLinearForPPO": lambda h, w, t: module(h, w, t)}


def _liger() -> dict[str, LmHead]:
    from liger_kernel.chunked_loss.fused_linear_ppo import _ChunkedSelectiveLogProbFunction

    def head(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> Output:
        return _ChunkedSelectiveLogProbFunction.apply(hidden, weight, tokens, None, 1.0, 4096), None

    return {"liger-kernel chunked (log-prob only)": head}
