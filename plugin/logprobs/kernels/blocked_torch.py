"""The two passes in plain torch operations, a block of rows at a time. Runs everywhere.

Blocks keep every temporary inside the cache; nothing of the size of the logits is allocated.
"""

from __future__ import annotations

import torch

from plugin.logprobs.kernels.row_statistics import (
    LOWEST_EXPONENT,
    RowNormalizer,
    ShardStatistics,
)

name = "blocked_torch"

# Float32 temporaries of one block. On the CPU a few blocks fit into a last-level cache; on an
# accelerator the launch of an operation costs more than a pass over memory, so blocks are larger.
_BLOCK_BYTES = {"cpu": 4 << 20}
_BLOCK_BYTES_ACCELERATOR = 256 << 20


def block_rows(rows: int, columns: int, device_type: str = "cpu") -> int:
    """How many rows of `[rows, columns]` logits make one block; at least 1."""
    budget = _BLOCK_BYTES.get(device_type, _BLOCK_BYTES_ACCELERATOR)
    return max(1, min(rows, budget // max(1, 4 * columns)))


def forward_blocks(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    scale: float,
    with_entropy: bool,
) -> ShardStatistics:
    """Summarize `[T, V/tp]` logits row by row; see `RowKernels`."""
    rows, columns = logits.shape
    maximum, sum_exp = (logits.new_empty(rows, dtype=torch.float32) for _ in range(2))
    weighted_sum = torch.empty_like(maximum) if with_entropy else None
    step = block_rows(rows, columns, logits.device.type)
    for start in range(0, rows, step):
        block = slice(start, start + step)
        exponent = logits[block].to(torch.float32, copy=True)
        torch.amax(exponent, dim=-1, out=maximum[block])
        # A row of -inf has maximum -inf; subtracting 0 instead gives sums of 0, not NaN.
        shift = maximum[block].masked_fill(maximum[block] == -torch.inf, 0.0)
        exponent.sub_(shift[:, None]).mul_(scale).clamp_(min=LOWEST_EXPONENT)
        weight = exponent.exp()
        torch.sum(weight, dim=-1, out=sum_exp[block])
        if weighted_sum is not None:
            torch.sum(weight.mul_(exponent), dim=-1, out=weighted_sum[block])
    target_logit = logits.gather(-1, targets.clamp(min=0)[:, None])[:, 0].float()
    return ShardStatistics(
        maximum, sum_exp, weighted_sum, target_logit.masked_fill(targets < 0, 0.0)
    )


def backward_blocks(
    logits: torch.Tensor,
    targets: torch.Tensor,
    rows: RowNormalizer,
    grad_log_probs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    *,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Write the gradient of `[T, V/tp]` logits into `out`; see `RowKernels`.

    With p the probability, d(log_prob)/dz = [target] - p and d(entropy)/dz = -p (log p + entropy).
    """
    grad_target = None if grad_log_probs is None else grad_log_probs.float() * scale
    grad_spread = None
    if grad_entropy is not None and rows.entropy is not None:
        grad_spread = grad_entropy.float() * scale
    idle = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
    for given in (grad_target, grad_spread):
        if given is not None:
            idle &= given == 0
    step = block_rows(logits.shape[0], logits.shape[1], logits.device.type)
    for start in range(0, logits.shape[0], step):
        block = slice(start, start + step)
        log_prob = logits[block].to(torch.float32, copy=True)
        log_prob.sub_(rows.maximum[block, None]).mul_(scale).clamp_(min=LOWEST_EXPONENT)
        grad = log_prob.exp().div_(-rows.sum_exp[block, None])
        log_prob.sub_(rows.sum_exp[block, None].log())
        if grad_spread is not None and rows.entropy is not None:
            log_prob.add_(rows.entropy[block, None]).mul_(grad_spread[block, None])
            if grad_target is not None:
                log_prob.add_(grad_target[block, None])
            grad.mul_(log_prob)
        elif grad_target is not None:
            grad.mul_(grad_target[block, None])
        if grad_target is not None:
            at_target = grad_target[block].masked_fill(targets[block] < 0, 0.0)
            grad.scatter_add_(-1, targets[block].clamp(min=0)[:, None], at_target[:, None])
        out[block] = grad.masked_fill_(idle[block, None], 0.0)
