"""What replaying a sampling mask adds to the log-prob pass: 20 kept ids per token against none.

Both ways take turns in one run and the best time of each counts, so that other work on the machine meets both alike. On
one thread and on two: the operations on kept ids are short, and on a busy machine two threads wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from plugin.logprobs.fused_lm_head import fused_log_probs_and_entropy
from plugin.logprobs.vocab_parallel import log_probs_and_entropy
from plugin.ragged import Ragged

KEPT = 20
REPEATS, REPEATS_OF_PRODUCTS = 15, 4
HIDDEN = 256
THREADS = (1, 2)


def measure_sampling_mask(quick: bool) -> dict[str, Any]:
    """Seconds of every pass without and with kept ids."""
    rows, columns = (64, 20_000) if quick else (512, 151_936)
    tokens = torch.arange(rows) * 7 % columns
    kept = _kept_ids(rows, columns, tokens)
    before, results = torch.get_num_threads(), []
    for threads in THREADS:
        torch.set_num_threads(threads)
        results += [
            {
                "pass": name,
                "dtype": str(dtype)[6:],
                "threads": threads,
                **_best(run, kept, REPEATS_OF_PRODUCTS if "head" in name else REPEATS),
            }
            for dtype in (torch.float32, torch.bfloat16)
            for name, run in _passes(rows, columns, tokens, dtype).items()
        ]
    torch.set_num_threads(before)
    return {"rows": rows, "columns": columns, "kept": KEPT, "results": results}


def _passes(
    rows: int, columns: int, tokens: torch.Tensor, dtype: torch.dtype
) -> dict[str, Callable[[Ragged | None], object]]:
    """Log-prob pass and training pass from logits, log-prob pass from hidden states."""
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, columns, generator=generator).mul_(2.5).to(dtype)
    hidden = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(columns, HIDDEN, generator=generator).to(dtype)
    ones = torch.ones(rows)

    def log_probs(kept: Ragged | None) -> object:
        with torch.no_grad():
            return log_probs_and_entropy(logits, tokens, kept=kept, with_entropy=False)

    def with_entropy(kept: Ragged | None) -> object:
        with torch.no_grad():
            return log_probs_and_entropy(logits, tokens, kept=kept)

    def training(kept: Ragged | None) -> object:
        source = logits.detach().requires_grad_()
        found, _ = log_probs_and_entropy(source, tokens, kept=kept, inplace_grad=True)
        return torch.autograd.grad(found, source, ones)

    def fused(kept: Ragged | None) -> object:
        with torch.no_grad():
            return fused_log_probs_and_entropy(
                hidden, weight, tokens, kept=kept, with_entropy=False
            )

    return {
        "log-prob pass": log_probs,
        "log-prob pass and entropy": with_entropy,
        "log-prob pass, fused LM head": fused,
        # Last: it overwrites the logits.
        "training, entropy as a metric": training,
    }


def _best(run: Callable[[Ragged | None], object], kept: Ragged, repeats: int) -> dict[str, float]:
    """Best wall and processor seconds of each way; the two take turns."""
    found = {
        f"{way}{kind}": float("inf") for way in ("without", "with") for kind in ("", "_processor")
    }
    for number in range(repeats + 1):
        for way, ids in (("without", None), ("with", kept)):
            start, start_processor = time.perf_counter(), time.process_time()
            run(ids)
            wall, processor = time.perf_counter() - start, time.process_time() - start_processor
            if number:  # the first one builds the kernel and touches the memory
                found[way] = min(found[way], wall)
                found[f"{way}_processor"] = min(found[f"{way}_processor"], processor)
    return found


def _kept_ids(rows: int, columns: int, tokens: torch.Tensor) -> Ragged:
    """KEPT ascending ids per row, spread over the vocabulary, with the row's token."""
    generator = torch.Generator().manual_seed(1)
    ids = [
        torch.randperm(columns - 1, generator=generator)[: KEPT - 1].add(token + 1) % columns
        for token in tokens
    ]
    kept = [
        torch.cat([row, token[None]]).sort().values for row, token in zip(ids, tokens, strict=True)
    ]
    return Ragged.of([row.int() for row in kept])
