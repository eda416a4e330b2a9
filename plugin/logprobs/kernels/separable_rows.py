"""Log-prob, loss and gradient of a block of rows while it is in cache, with any of the row kernels."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from plugin.logprobs.kernels.blocked_torch import block_rows
from plugin.logprobs.kernels.row_statistics import (
    KERNEL_INPUTS,
    RowKernels,
    RowNormalizer,
)
from plugin.loss.token_program import TokenProgram


def separable_rows(
    kernels: RowKernels,
    logits: torch.Tensor,
    targets: torch.Tensor,
    active: torch.Tensor,
    program: TokenProgram,
    fields: Mapping[str, torch.Tensor],
    *,
    scale: float,
    with_entropy: bool,
    out: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies `[T]`, and in `out` the gradient of a token-separable loss.

    program: derivatives of a token's loss by its log-prob and its entropy; fields: its other inputs, each `[T]`
    active: bool `[T]`; other rows have results 0 and a gradient of exactly 0
    out: like the logits `[T, V]`, and may be the logits
    """
    rows = logits.shape[0]
    log_probs, entropies = (torch.zeros_like(targets, dtype=torch.float32) for _ in range(2))
    step = block_rows(rows, logits.shape[1], logits.device.type)
    for start in range(0, rows, step):
        block = slice(start, start + step)
        values, normalizer = _block_values(
            kernels, logits[block], targets[block], scale, with_entropy
        )
        inputs = {name: field[block] for name, field in fields.items()}
        inputs |= dict(zip(KERNEL_INPUTS, values, strict=True))
        used = active[block]
        grads = [torch.where(used, grad, 0.0) for grad in program.run(inputs)]
        kernels.backward_blocks(
            logits[block],
            targets[block],
            normalizer,
            grads[0],
            grads[1] if with_entropy else None,
            scale=scale,
            out=out[block],
        )
        log_probs[block], entropies[block] = (torch.where(used, value, 0.0) for value in values)
    return log_probs, entropies


def _block_values(
    kernels: RowKernels,
    logits: torch.Tensor,
    targets: torch.Tensor,
    scale: float,
    with_entropy: bool,
) -> tuple[tuple[torch.Tensor, torch.Tensor], RowNormalizer]:
    statistics = kernels.forward_blocks(logits, targets, scale=scale, with_entropy=with_entropy)
    sum_exp = statistics.sum_exp.double()
    exponent = (statistics.target_logit.double() - statistics.maximum) * scale
    exponent = exponent.masked_fill(targets < 0, -torch.inf)
    log_probs = (exponent - sum_exp.log()).float()
    if statistics.weighted_sum is None:
        normalizer = RowNormalizer(statistics.maximum, statistics.sum_exp, None)
        return (log_probs, torch.zeros_like(log_probs)), normalizer
    entropy = (sum_exp.log() - statistics.weighted_sum / sum_exp).float()
    return (log_probs, entropy), RowNormalizer(statistics.maximum, statistics.sum_exp, entropy)
