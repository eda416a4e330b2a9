"""The LM head fused with a token-separable loss: three products, one block of logits at a time.

A block of hidden states is multiplied with the weight; log-probs and entropies of its rows, the
loss of these rows and its gradient follow at once; the block's logits become their own gradient,
which is multiplied back into both factors. The ordinary fused head cannot do that: it knows the
gradient of a row only after the loss of all rows, and computes most logits a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from plugin.errors import BatchError, ConfigError
from plugin.logprobs.fused_lm_head import budget_bytes, check_arguments, spread_rows
from plugin.logprobs.lm_head_tiles import add_product
from plugin.logprobs.row_gradients import BlockGradients, RowSettings, summarize_rows
from plugin.logprobs.row_ids import EntropyOf
from plugin.ragged import Ragged

#: (block of rows, their log-probs [n], their entropies [n]) -> their losses, to be summed;
#: differentiable.
RowLosses = Callable[[slice, torch.Tensor, torch.Tensor], torch.Tensor]

# The expected gradient arrives as a product of a few float32 factors.
_ROUNDING = 1e-6


def separable_lm_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    row_losses: RowLosses,
    *,
    rows: torch.Tensor | None = None,
    temperature: float = 1.0,
    expected_gradient: float = 1.0,
    memory_budget_bytes: int | None = None,
    kept: Ragged | None = None,
    entropy_of: EntropyOf = "full",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probs `[n]`, entropies `[n]`, and a 0 that carries the gradient of all losses.

    Args:
        hidden: `[T, H]`.
        weight: `[V, H]`, the whole output layer.
        tokens: `[n]` int64, the token whose log-prob each row gives.
        row_losses: called for one block of the n rows after the other.
        rows: `[n]` int64, the rows of `hidden` to compute, ascending; None = all of them. Others
            are not read.
        temperature: divides the logits.
        expected_gradient: what will arrive at the returned 0 in the backward pass. If it does, the
            backward pass costs nothing; otherwise it multiplies the gradients once more.
        memory_budget_bytes: room for a block of logits, which has at least one row; by default
            `DEFAULT_BUDGET_BYTES` of the device.
        kept: [n] entries of token ids, which each row's distribution is renormalized over; an empty
            one keeps all (see `log_probs_and_entropy`).
        entropy_of: with `kept`, the distribution whose entropy is returned: full or kept.

    Log-probs and entropies carry no gradient: add the returned 0 to the value of the loss.
    """
    count = hidden.shape[0] if rows is None else rows.numel()
    check_arguments(hidden, weight, tokens, None, count)
    budget = budget_bytes(memory_budget_bytes, hidden.device)
    if kept is not None and len(kept) != count:
        raise BatchError(f"kept ids of {len(kept)} rows for {count} tokens; give one entry per row")
    settings = _Settings(
        row_losses,
        RowSettings(None, 1.0 / temperature, True, True, entropy_of),
        expected_gradient,
        budget,
        kept,
    )
    return _SeparableLmHead.apply(hidden, weight, tokens, rows, settings)


def separable_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    *,
    rows: torch.Tensor,
    temperature: float = 1.0,
    memory_budget_bytes: int | None = None,
    kept: Ragged | None = None,
    entropy_of: EntropyOf = "full",
) -> torch.Tensor:
    """Return the log-probs `[n]` of `separable_lm_head` to the bit, without loss or gradient."""
    check_arguments(hidden, weight, tokens, None, rows.numel())
    settings = RowSettings(None, 1.0 / temperature, True, True, entropy_of)
    log_probs = torch.zeros_like(tokens, dtype=torch.float32)
    used, budget = hidden[rows], budget_bytes(memory_budget_bytes, hidden.device)
    for block, logits in _blocks(used, weight, budget):
        few = None if kept is None else kept[block]
        log_probs[block] = summarize_rows(logits, tokens[block], few, None, settings).log_probs
    return log_probs


def _blocks(
    hidden: torch.Tensor, weight: torch.Tensor, budget: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Blocks of rows and their logits, each of which overwrites those before it."""
    count, columns = hidden.shape[0], weight.shape[0]
    most = max(1, budget // (columns * hidden.element_size()))
    height = -(-count // max(1, -(-count // most)))  # blocks of one height, give or take a row
    buffer = hidden.new_empty(height, columns)
    for start in range(0, count, max(1, height)):
        block = slice(start, min(start + height, count))
        yield block, torch.mm(hidden[block], weight.t(), out=buffer[: block.stop - start])


class _Settings(NamedTuple):
    row_losses: RowLosses
    rows: RowSettings
    expected_gradient: float
    budget: int
    kept: Ragged | None


class _SeparableLmHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        tokens: torch.Tensor,
        rows: torch.Tensor | None,
        settings: _Settings,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        total = hidden.shape[0]
        hidden = hidden if rows is None else hidden[rows]
        count = hidden.shape[0]
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight: torch.Tensor | None = None
        log_probs, entropies = (torch.zeros_like(tokens, dtype=torch.float32) for _ in range(2))
        for block, logits in _blocks(hidden, weight, settings.budget):
            log_probs[block], entropies[block] = _to_gradient(
                logits, tokens[block], block, settings
            )
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[block])
            if want_weight and grad_weight is not None:
                add_product(grad_weight, logits.t(), hidden[block])
            elif want_weight:
                grad_weight = torch.mm(logits.t(), hidden[block])
                # Many blocks add to the same weight, so those sums are float32 whatever the model's
                # dtype.
                grad_weight = grad_weight if block.stop >= count else grad_weight.float()
        if want_weight and grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        ctx.gradients = [
            None if grad_hidden is None else spread_rows(grad_hidden, rows, total),
            None if grad_weight is None else grad_weight.to(weight.dtype),
        ]
        ctx.expected = settings.expected_gradient
        ctx.mark_non_differentiable(log_probs, entropies)
        return log_probs, entropies, log_probs.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, __: Any, arriving: torch.Tensor) -> Any:
        if ctx.gradients is None:
            raise ConfigError(
                "second backward pass through separable_lm_head: the first one delivered the "
                "gradients. Use --separable-fast-path off to use the graph twice."
            )
        gradients, ctx.gradients = ctx.gradients, None
        for gradient in gradients:
            if gradient is not None:
                _rescale(gradient, arriving, ctx.expected)
        return *gradients, None, None, None


def _to_gradient(
    logits: torch.Tensor, tokens: torch.Tensor, block: slice, settings: _Settings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn logits `[n, V]` into the gradient of their losses; return log-probs and entropies."""
    kept = None if settings.kept is None else settings.kept[block]
    log_probs, entropy, _, state = summarize_rows(logits, tokens, kept, None, settings.rows)
    assert entropy is not None
    with torch.enable_grad():
        leaves = log_probs.requires_grad_(), entropy.detach().requires_grad_()
        losses = settings.row_losses(block, *leaves).sum() * settings.expected_gradient
        gradients = torch.autograd.grad(losses, leaves, allow_unused=True)
    gradient = BlockGradients.of(state, gradients[0], gradients[1], None, settings.rows)
    gradient.write(logits, logits)
    return log_probs.detach(), entropy


def _rescale(gradient: torch.Tensor, arriving: torch.Tensor, expected: float) -> None:
    """Multiply by arriving / expected, unless that is 1."""
    ratio = arriving.double() / expected
    if gradient.device.type == "cuda":
        # The kernel reads the ratio itself: reading it here would stall the host.
        from plugin.logprobs.kernels.triton_rows import scale_unless_one

        scale_unless_one(gradient, ratio.float(), _ROUNDING)
    elif gradient.device.type != "cpu":
        # A loss that failed: 0, also where the gradient is not finite.
        scaled = torch.where(ratio == 0.0, 0.0, gradient * ratio.to(gradient.dtype))
        gradient.copy_(torch.where((ratio - 1.0).abs() > _ROUNDING, scaled, gradient))
    elif float(ratio) == 0.0:
        gradient.zero_()  # as above
    elif abs(float(ratio) - 1.0) > _ROUNDING:
        gradient.mul_(ratio.to(gradient.dtype))
