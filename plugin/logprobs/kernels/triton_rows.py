"""The two passes as Triton kernels: one program per row, a loop over its columns.

The number of rows is only the launch grid, so microbatches of any length share one compilation,
which Triton caches across processes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plugin.logprobs.kernels.row_statistics import RowNormalizer, ShardStatistics

name = "triton_rows"

_BLOCK = 4096
_WARPS = 8


@triton.jit(
    do_not_specialize=["rows"]
)  # by default some row counts would get a compilation of their own
def _forward_kernel(  # type: ignore[no-untyped-def]
    logits,
    targets,
    sums,
    rows,
    columns,
    row_stride,
    scale,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    # Every lane keeps its own running maximum and sums; they meet once, at the end of the row.
    maximum = tl.full((BLOCK,), float("-inf"), tl.float32)
    sum_exp = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < columns
        values = tl.load(logits + offsets, mask=inside, other=float("-inf")).to(tl.float32)
        # Written so that a NaN enters the sums through the exponent below, not through the maximum.
        raised = tl.where(values > maximum, values, maximum)
        # A lane that has seen only -inf has nothing to rescale; any finite exponent serves.
        shift = tl.where(maximum == float("-inf"), 0.0, (maximum - raised) * scale)
        base = tl.where(raised == float("-inf"), 0.0, raised)
        exponent = (values - base) * scale
        exponent = tl.where(exponent < -1.0e4, -1.0e4, exponent)
        factor = tl.exp(shift)
        weight = tl.exp(exponent)
        if ENTROPY:
            weighted = factor * (weighted + shift * sum_exp) + weight * exponent
        sum_exp = factor * sum_exp + weight
        maximum = raised
    row_maximum = tl.max(maximum, axis=0)
    shift = tl.where(maximum == float("-inf"), 0.0, (maximum - row_maximum) * scale)
    factor = tl.exp(shift)
    tl.store(sums + row, row_maximum)
    tl.store(sums + rows + row, tl.sum(factor * sum_exp, axis=0))
    if ENTROPY:
        tl.store(sums + 2 * rows + row, tl.sum(factor * (weighted + shift * sum_exp), axis=0))
    target = tl.load(targets + row)
    target_logit = tl.load(logits + target, mask=target >= 0, other=0.0)
    tl.store(sums + 3 * rows + row, target_logit.to(tl.float32))


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    logits,
    targets,
    maxima,
    sum_exps,
    entropies,
    grads_log_prob,
    grads_entropy,
    out,
    columns,
    row_stride,
    out_stride,
    scale,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    out += row * out_stride
    target = tl.load(targets + row)
    maximum = tl.load(maxima + row)
    sum_exp = tl.load(sum_exps + row)
    on_target = tl.load(grads_log_prob + row) * scale
    on_entropy = tl.load(grads_entropy + row) * scale
    offset = tl.load(entropies + row) - tl.log(sum_exp)
    idle = (on_target == 0.0) & (on_entropy == 0.0)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < columns
        values = tl.load(logits + offsets, mask=inside, other=float("-inf")).to(tl.float32)
        exponent = (values - maximum) * scale
        exponent = tl.where(exponent < -1.0e4, -1.0e4, exponent)
        slope = on_target + on_entropy * (exponent + offset)
        grad = tl.where(offsets == target, on_target, 0.0) - tl.exp(exponent) / sum_exp * slope
        grad = tl.where(idle, 0.0, grad)
        tl.store(out + offsets, grad.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scale_kernel(values, factor, columns, row_stride, tolerance, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    by = tl.load(factor)
    if tl.abs(by - 1.0) > tolerance:
        values += tl.program_id(0).to(tl.int64) * row_stride
        for start in range(0, columns, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            inside = offsets < columns
            scaled = tl.load(values + offsets, mask=inside, other=0.0).to(tl.float32) * by
            # A factor of 0 stands for a loss that failed; its gradient may hold anything.
            scaled = tl.where(by == 0.0, 0.0, scaled)
            tl.store(values + offsets, scaled.to(values.dtype.element_ty), mask=inside)


def scale_unless_one(values: torch.Tensor, factor: torch.Tensor, tolerance: float) -> None:
    """Multiply `[T, V]` in place by a scalar on the device, unless it is 1 +- `tolerance`."""
    if values.shape[0] > 0:
        columns = values.shape[1]
        _scale_kernel[(values.shape[0],)](
            values,
            factor,
            columns,
            values.stride(0),
            tolerance,
            BLOCK=_block(columns),
            num_warps=_WARPS,
        )


def forward_blocks(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    scale: float,
    with_entropy: bool,
) -> ShardStatistics:
    """Summarize `[T, V/tp]` logits row by row; see `RowKernels`."""
    rows, columns = logits.shape
    sums = logits.new_empty((4, rows), dtype=torch.float32)
    if rows > 0:
        _forward_kernel[(rows,)](
            logits,
            targets.contiguous(),
            sums,
            rows,
            columns,
            logits.stride(0),
            scale,
            ENTROPY=with_entropy,
            BLOCK=_block(columns),
            num_warps=_WARPS,
        )
    return ShardStatistics(sums[0], sums[1], sums[2] if with_entropy else None, sums[3])


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
    """Write the gradient of `[T, V/tp]` logits into `out`; see `RowKernels`."""
    count, columns = logits.shape
    if count == 0:
        return
    grad_entropy = None if rows.entropy is None else grad_entropy
    row_values = [
        torch.zeros_like(rows.maximum) if value is None else value.to(torch.float32).contiguous()
        for value in (rows.maximum, rows.sum_exp, rows.entropy, grad_log_probs, grad_entropy)
    ]
    _backward_kernel[(count,)](
        logits,
        targets.contiguous(),
        *row_values,
        out,
        columns,
        logits.stride(0),
        out.stride(0),
        scale,
        BLOCK=_block(columns),
        num_warps=_WARPS,
    )


def _block(columns: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(columns))
