"""From logits to their gradient through a whole loss with a correction: in two phases, and in one visit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.workers import run_in_ranks
from plugin.config import TrainerConfig
from plugin.logprobs import separable_logprobs
from plugin.logprobs import vocab_parallel as vocab_parallel_logprobs
from plugin.logprobs.kernels import blocked_torch
from plugin.logprobs.separable_logprobs import separable_log_probs
from plugin.logprobs.vocab_parallel import log_probs_and_entropy
from plugin.loss.interfaces import LossInputs
from plugin.loss.separable_loss import gradient_program, loss_gradients
from plugin.sharding.sequence_shards import SequenceShards

THREADS = 2
# Rows, columns, dtype, coefficient of the entropy, share of the rows that carry loss
Shape = tuple[int, int, str, float, float]


def measure_separable(quick: bool) -> list[dict[str, Any]]:
    """Both paths on several shapes; ppo with truncated importance sampling."""
    large = [(64, 20_000)] if quick else [(384, 151_936), (2048, 32_768)]
    shapes: list[Shape] = [
        (*size, dtype, coefficient, 1.0)
        for size in large
        for dtype in ("float32", "bfloat16")
        for coefficient in (0.0, 0.01)
    ]
    shapes.append((*large[0], "float32", 0.01, 0.5))
    shapes += [(rows, 8192, "float32", 0.01, 1.0) for rows in (1, 8, 64, 512)]
    return run_in_ranks(
        _measure, (shapes, 2 if quick else 9), ranks=1, threads=THREADS, seconds=1800
    )


def _measure(group: dist.ProcessGroup, shapes: list[Shape], repeats: int) -> list[dict[str, Any]]:
    return [_measure_shape(shape, repeats) for shape in shapes]


def _measure_shape(shape: Shape, repeats: int) -> dict[str, Any]:
    rows, _, _, coefficient, _ = shape
    original, tokens, fields = _workload(shape)
    config = TrainerConfig(use_tis=True, entropy_coef=coefficient)
    logits = original.clone().requires_grad_()
    paths: dict[str, Callable[[], torch.Tensor]] = {
        "two phases": lambda: _two_phases(config, logits, tokens, fields),
        "one visit": lambda: _one_visit(config, logits, tokens, fields),
    }
    for name, path in list(paths.items()):
        paths[f"{name}, no compiler"] = lambda path=path: _without_compiler(path)
    seconds = dict.fromkeys([*paths, "copy", "loss and hook alone"], float("inf"))
    gradients: dict[str, torch.Tensor] = {}
    zeros = torch.zeros(rows)
    for repeat in range(repeats):
        for name, path in paths.items():
            with torch.no_grad():
                logits.copy_(original)
            start = time.perf_counter()
            gradient = path()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
            if repeat == 0:
                gradients[name] = gradient[:32].float().clone()
        seconds["copy"] = min(seconds["copy"], _timed(lambda: logits.detach().copy_(original)))
        alone = _timed(
            lambda: loss_gradients(config, _inputs(fields, zeros, zeros), fields["weights"])
        )
        seconds["loss and hook alone"] = min(seconds["loss and hook alone"], alone)
    expected = gradients["two phases"]
    difference = (gradients["one visit"] - expected).abs().max() / expected.abs().max()
    return {"shape": shape, "seconds": seconds, "difference": float(difference)}


def _workload(shape: Shape) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    rows, columns, dtype, _, share = shape
    generator = torch.Generator().manual_seed(0)
    original = torch.randn(rows, columns, generator=generator).mul_(2.5).to(getattr(torch, dtype))
    tokens = torch.randint(columns, (rows,), generator=generator)
    near, _ = log_probs_and_entropy(original, tokens, with_entropy=False)
    fields = {"weights": (torch.rand(rows, generator=generator) < share).float() / rows}
    for name in ("train_log_probs", "rollout_log_probs"):
        fields[name] = near + 0.1 * torch.randn(rows, generator=generator)
    fields["advantages"] = torch.randn(rows, generator=generator)
    return original, tokens, fields


def _inputs(
    fields: dict[str, torch.Tensor], cur: torch.Tensor, entropy: torch.Tensor
) -> LossInputs:
    mask = fields["weights"] > 0
    lengths = [mask.numel()]
    return LossInputs(
        mask=mask,
        shards=SequenceShards.of(lengths, lengths, mask.device),
        cur_log_probs=cur,
        loss_masks=[mask.long()],
        total_lengths=lengths,
        entropy=entropy,
        **{name: value for name, value in fields.items() if name != "weights"},  # type: ignore[arg-type]
    )


def _two_phases(
    config: TrainerConfig,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    fields: dict[str, torch.Tensor],
) -> torch.Tensor:
    entropy_grad = config.entropy_coef != 0
    cur, entropy = log_probs_and_entropy(
        logits, tokens, entropy_grad=entropy_grad, inplace_grad=True
    )
    assert entropy is not None
    grads = loss_gradients(config, _inputs(fields, cur, entropy), fields["weights"])
    outputs = [cur, entropy] if entropy_grad else [cur]
    (gradient,) = torch.autograd.grad(outputs, logits, list(grads)[: len(outputs)])
    return gradient


def _one_visit(
    config: TrainerConfig,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    fields: dict[str, torch.Tensor],
) -> torch.Tensor:
    program = gradient_program(config, True)
    *_, anchor = separable_log_probs(logits, tokens, program, fields, inplace_grad=True)
    (gradient,) = torch.autograd.grad(anchor, logits)
    return gradient


def _without_compiler(path: Callable[[], torch.Tensor]) -> torch.Tensor:
    with (
        mock.patch.object(separable_logprobs, "row_kernels_for", lambda logits: blocked_torch),
        mock.patch.object(vocab_parallel_logprobs, "row_kernels_for", lambda logits: blocked_torch),
    ):
        return path()


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
