"""The LM head fused with a token-separable loss: three matrix products, and no logits that outlive a block of rows.

A block of hidden states meets the weight, its logits are turned into their gradient while they are at hand (see
`separable_logprobs`), and the gradient is multiplied back at once. The ordinary fused head cannot do that: it learns the
gradient of a row only after the loss of all rows, and computes most logits a second time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from plugin.logprobs.fused_lm_head import (
    add_product,
    budget_bytes,
    check_arguments,
    rows_of,
    spread_rows,
)
from plugin.logprobs.separable_logprobs import hand_out, run_rows
from plugin.logprobs.vocab_parallel import locate_targets
from plugin.loss.token_program import TokenProgram


def separable_lm_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    program: TokenProgram,
    fields: Mapping[str, torch.Tensor],
    *,
    row_mask: torch.Tensor,
    temperature: float = 1.0,
    expected_gradient: float = 1.0,
    memory_budget_bytes: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`separable_log_probs(hidden @ weight.T, ...)` in bounded memory, with gradients for both factors.

    Args:
        hidden: `[T, H]`.
        weight: `[V, H]`, the whole output layer.
        row_mask: bool `[T]` on the CPU: the rows to compute. It must hold every row whose `weights` are not 0.
        memory_budget_bytes: room for a block of logits, which has at least one row.

    The other arguments, and what is returned, are those of `separable_log_probs`.
    """
    check_arguments(hidden, weight, tokens, row_mask, hidden.shape[0])
    budget = budget_bytes(memory_budget_bytes, hidden.device)
    rows = rows_of(row_mask, hidden.device)
    settings = _Settings(program, fields, 1.0 / temperature, expected_gradient, budget)
    return _SeparableLmHead.apply(hidden, weight, tokens, rows, settings)


class _Settings(NamedTuple):
    program: TokenProgram
    fields: Mapping[str, torch.Tensor]
    scale: float
    expected_gradient: float
    budget: int


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
        fields, total = settings.fields, hidden.shape[0]
        if rows is not None:
            hidden, tokens = hidden[rows], tokens[rows]
            fields = {name: field[rows] for name, field in fields.items()}
        targets, _ = locate_targets(tokens, weight.shape[0], group=None)
        head = _Head(hidden, weight, ctx.needs_input_grad[:2])
        log_probs, entropy = head.run(targets, fields, settings)
        ctx.gradients = [
            None if head.grad_hidden is None else spread_rows(head.grad_hidden, rows, total),
            None if head.grad_weight is None else head.grad_weight.to(weight.dtype),
        ]
        ctx.expected = settings.expected_gradient
        results = [spread_rows(values, rows, total) for values in (log_probs, entropy)]
        ctx.mark_non_differentiable(*results)
        return results[0], results[1], log_probs.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, __: Any, arriving: torch.Tensor) -> Any:
        return *hand_out(ctx, arriving, "separable_lm_head"), None, None, None


class _Head:
    """Hidden states `[n, H]` and weight `[V, H]` with their gradients, as far as they are wanted."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, wanted: tuple[bool, ...]
    ) -> None:
        self.hidden, self.weight = hidden, weight
        self.grad_hidden = torch.empty_like(hidden) if wanted[0] else None
        self.wants_weight = wanted[1]
        self.grad_weight: torch.Tensor | None = None

    def run(
        self, targets: torch.Tensor, fields: Mapping[str, torch.Tensor], settings: _Settings
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies `[n]`; the gradients are complete afterwards."""
        log_probs, entropy = (torch.zeros_like(targets, dtype=torch.float32) for _ in range(2))
        weights = fields["weights"]
        scaled = {**fields, "weights": weights * settings.expected_gradient}
        for rows, logits in self._blocks(settings.budget):
            log_probs[rows], entropy[rows] = run_rows(
                logits,
                targets[rows],
                weights[rows] > 0,
                settings.program,
                {name: field[rows] for name, field in scaled.items()},
                scale=settings.scale,
                out=logits,
            )
            self._multiply_back(rows, logits)
        if self.wants_weight and self.grad_weight is None:
            self.grad_weight = torch.zeros_like(self.weight)
        return log_probs, entropy

    def _blocks(self, budget: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Ranges of rows of one size, give or take one, with their logits; the next range overwrites them."""
        rows, columns = self.hidden.shape[0], self.weight.shape[0]
        most = max(1, budget // (columns * self.hidden.element_size()))
        self.num_blocks = -(-rows // most)
        if not rows:
            return
        height = -(-rows // self.num_blocks)
        buffer = self.hidden.new_empty(height, columns)
        for start in range(0, rows, height):
            block = slice(start, min(start + height, rows))
            logits = buffer[: block.stop - start]
            yield block, torch.mm(self.hidden[block], self.weight.t(), out=logits)

    def _multiply_back(self, rows: slice, gradient: torch.Tensor) -> None:
        """The gradient of the logits of a block, times the weight and times the hidden states."""
        hidden = self.hidden[rows]
        if self.grad_hidden is not None:
            torch.mm(gradient, self.weight, out=self.grad_hidden[rows])
        if not self.wants_weight:
            return
        if self.grad_weight is not None:
            add_product(self.grad_weight, gradient.t(), hidden)
        elif self.num_blocks == 1:
            self.grad_weight = torch.mm(gradient.t(), hidden)
        else:
            # Many blocks add to the same weight, so those sums are float32 whatever the dtype of the model.
            self.grad_weight = torch.mm(gradient.t(), hidden).float()
