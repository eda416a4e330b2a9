"""Ours, and the formulations that people write themselves. Signature: `measure.Candidate`."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.measure import Mode
from plugin.logprobs import vocab_parallel as vocab_parallel_logprobs
from plugin.logprobs.kernels import blocked_torch
from plugin.logprobs.vocab_parallel import log_probs_and_entropy
from plugin.logprobs.vocab_shards import group_size

Result = tuple[torch.Tensor, torch.Tensor | None]
Group = dist.ProcessGroup | None


def ours(logits: torch.Tensor, tokens: torch.Tensor, group: Group, mode: Mode) -> Result:
    """The default: a fresh gradient."""
    return _ours(logits, tokens, group, mode, inplace=False)


def ours_in_place(logits: torch.Tensor, tokens: torch.Tensor, group: Group, mode: Mode) -> Result:
    """The gradient replaces the logits."""
    return _ours(logits, tokens, group, mode, inplace=True)


def ours_without_compiler(
    logits: torch.Tensor, tokens: torch.Tensor, group: Group, mode: Mode
) -> Result:
    """In place, on blocked torch operations: what runs where there is no C++ compiler."""
    with mock.patch.object(
        vocab_parallel_logprobs, "row_kernels_for", lambda logits: blocked_torch
    ):
        return _ours(logits, tokens, group, mode, inplace=True)


def _ours(
    logits: torch.Tensor, tokens: torch.Tensor, group: Group, mode: Mode, inplace: bool
) -> Result:
    return log_probs_and_entropy(
        logits,
        tokens,
        group=group,
        with_entropy=mode != "log_prob",
        entropy_grad=mode == "entropy_grad",
        inplace_grad=inplace,
    )


def eager(logits: torch.Tensor, tokens: torch.Tensor, group: Group, mode: Mode) -> Result:
    """`log_softmax`, `gather`, and the entropy by its definition."""
    log_soft = torch.log_softmax(logits.float(), dim=-1)
    log_probs = log_soft.gather(-1, tokens[:, None])[:, 0]
    if mode == "log_prob":
        return log_probs, None
    with torch.set_grad_enabled(mode == "entropy_grad"):
        return log_probs, -(log_soft.exp() * log_soft).sum(-1)


def compiled_plain(logits: torch.Tensor, tokens: torch.Tensor, group: Group, mode: Mode) -> Result:
    """`torch.compile` over the same formula, with its own autograd."""
    return _compiled_eager()(logits, tokens, group, mode)


@functools.cache
def _compiled_eager() -> Any:
    return torch.compile(eager)


class _SavedSoftmax(torch.autograd.Function):
    """The usual vocabulary-parallel formulation: three collectives, a softmax kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, group: Group, mode: Mode
    ) -> Result:
        logits = logits.float()
        columns, size = logits.shape[1], group_size(group)
        maximum = logits.max(dim=-1, keepdim=True).values
        _all_reduce(maximum, group, dist.ReduceOp.MAX)
        shifted = logits - maximum
        first = columns * dist.get_rank(group) if size > 1 else 0
        column = (tokens - first).clamp(0, columns - 1)
        held = (tokens >= first) & (tokens < first + columns)
        target = torch.where(held, shifted.gather(-1, column[:, None])[:, 0], 0.0)
        _all_reduce(target, group, dist.ReduceOp.SUM)
        softmax = shifted.exp()
        sum_exp = softmax.sum(-1, keepdim=True)
        _all_reduce(sum_exp, group, dist.ReduceOp.SUM)
        softmax.div_(sum_exp)
        entropy = None
        if mode != "log_prob":
            mean_logit = (softmax * shifted).sum(-1, keepdim=True)
            _all_reduce(mean_logit, group, dist.ReduceOp.SUM)
            entropy = (sum_exp.log() - mean_logit)[:, 0]
        log_sum = sum_exp.log()[:, 0]
        ctx.save_for_backward(softmax, column, held, entropy)
        ctx.mode = mode
        if entropy is not None and mode == "entropy_metric":
            ctx.mark_non_differentiable(entropy)
        return target - log_sum, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor) -> Any:
        softmax, column, held, entropy = ctx.saved_tensors
        grad = softmax * -grad_log_probs[:, None]
        rows = torch.arange(grad.shape[0])
        grad[rows, column] += torch.where(held, grad_log_probs, 0.0)
        if ctx.mode == "entropy_grad":
            inner = softmax.log().clamp_(min=-1e4) + entropy[:, None]
            grad -= softmax * inner * grad_entropy[:, None]
        return grad, None, None, None


def saved_softmax(logits: torch.Tensor, tokens: torch.Tensor, group: Group, mode: Mode) -> Result:
    """See `_SavedSoftmax`; autograd casts the gradient back to the dtype of the logits."""
    return _SavedSoftmax.apply(logits.float(), tokens, group, mode)


class _CompiledPasses(torch.autograd.Function):
    """Forward and backward compiled separately, gradient in place: the best `torch.compile` form we know."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, group: Group, mode: Mode
    ) -> Result:
        forward, backward = _compiled_passes()
        maximum, log_sum, entropy, target = forward(logits, tokens)
        ctx.save_for_backward(logits, tokens, maximum, log_sum, entropy)
        ctx.run = backward
        return target - maximum - log_sum, None if mode == "log_prob" else entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor | None) -> Any:
        logits, tokens, maximum, log_sum, entropy = ctx.saved_tensors
        if grad_entropy is None:
            grad_entropy = torch.zeros_like(grad_log_probs)
        out = logits.detach()
        at_target = out.gather(-1, tokens[:, None])[:, 0].float()
        ctx.run(out, maximum, log_sum, entropy, grad_log_probs, grad_entropy)
        log_prob = at_target - maximum - log_sum
        fixed = grad_log_probs - log_prob.exp() * (
            grad_log_probs + grad_entropy * (log_prob + entropy)
        )
        out.scatter_(-1, tokens[:, None], fixed[:, None].to(out.dtype))
        return out, None, None, None


def compiled_passes(logits: torch.Tensor, tokens: torch.Tensor, group: Group, mode: Mode) -> Result:
    """See `_CompiledPasses`."""
    log_probs, entropy = _CompiledPasses.apply(logits, tokens, group, mode)
    detached = entropy is not None and mode == "entropy_metric"
    return log_probs, entropy.detach() if detached else entropy


@functools.cache
def _compiled_passes() -> tuple[Any, Any]:
    def forward(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = logits.float()
        maximum = values.amax(-1)
        shifted = values - maximum[:, None]
        weight = shifted.exp()
        sum_exp = weight.sum(-1)
        entropy = sum_exp.log() - (weight * shifted).sum(-1) / sum_exp
        return maximum, sum_exp.log(), entropy, values.gather(-1, tokens[:, None])[:, 0]

    def backward(
        out: torch.Tensor,
        maximum: torch.Tensor,
        log_sum: torch.Tensor,
        entropy: torch.Tensor,
        grad_log_probs: torch.Tensor,
        grad_entropy: torch.Tensor,
    ) -> None:
        log_prob = out.float() - maximum[:, None] - log_sum[:, None]
        slope = grad_log_probs[:, None] + grad_entropy[:, None] * (log_prob + entropy[:, None])
        out.copy_(-log_prob.exp() * slope)

    return torch.compile(forward, dynamic=True), torch.compile(backward, dynamic=True)


def _all_reduce(tensor: torch.Tensor, group: Group, operation: Any) -> None:
    if group_size(group) > 1:
        dist.all_reduce(tensor, op=operation, group=group)
