"""Log-probs and the gradient of a token-separable loss in one visit to the logits.

The ordinary way is two phases: log-probs of all tokens, the loss of all tokens, then a second pass over the
logits for their gradient. When every token's loss depends on that token alone, the gradient of a row is known as
soon as its log-prob is, while the row is still in cache: the logits are read once and written once, and on the
CPU their exponentials are computed once instead of twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from plugin.errors import ConfigError
from plugin.logprobs.kernels import cpu_extension, row_kernels_for
from plugin.logprobs.kernels.separable_rows import separable_rows
from plugin.logprobs.vocab_parallel import (
    check_logits,
    locate_targets,
    with_separate_rows,
)
from plugin.loss.token_program import TokenProgram

# The expected gradient arrives as a product of a few float32 factors.
_ROUNDING = 1e-6


def separable_log_probs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    program: TokenProgram,
    fields: Mapping[str, torch.Tensor],
    *,
    temperature: float = 1.0,
    expected_gradient: float = 1.0,
    inplace_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs `[T]`, entropies `[T]`, and a 0 that carries the gradient of the loss `sum_t l_t`.

    Args:
        logits: `[T, V]`, the whole vocabulary; see `log_probs_and_entropy`.
        tokens: `[T]` int64.
        program: derivatives of a token's loss `l_t` by its log-prob and its entropy.
        fields: the program's other inputs by name, each `[T]` float32. Rows whose `weights` are 0 are not
            computed: their results are 0, whatever their logits hold.
        expected_gradient: what will arrive at the returned 0 in the backward pass. If it does, the backward pass
            costs nothing; otherwise it multiplies the gradient once more.
        inplace_grad: the gradient replaces the logits already in the forward pass. Only for a caller that owns
            them.

    Log-probs and entropies carry no gradient: add the returned 0 to the value of the loss.
    """
    check_logits(logits, tokens)
    logits = with_separate_rows(logits)
    settings = _Settings(program, fields, 1.0 / temperature, expected_gradient, inplace_grad)
    return _SeparableLogProbs.apply(logits, tokens, settings)


class _Settings(NamedTuple):
    program: TokenProgram
    fields: Mapping[str, torch.Tensor]
    scale: float
    expected_gradient: float
    inplace_grad: bool


class _SeparableLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, settings: _Settings
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        targets, _ = locate_targets(tokens, logits.shape[1], group=None)
        weights = settings.fields["weights"]
        scaled = {**settings.fields, "weights": weights * settings.expected_gradient}
        gradient = logits.detach() if settings.inplace_grad else torch.empty_like(logits)
        log_probs, entropy = run_rows(
            logits,
            targets,
            weights > 0,
            settings.program,
            scaled,
            scale=settings.scale,
            out=gradient,
        )
        if settings.inplace_grad:
            # See `log_probs_and_entropy`: whoever saved these logits must notice that they are gone.
            torch.autograd.graph.increment_version(logits)
        ctx.gradients, ctx.expected = [gradient], settings.expected_gradient
        ctx.mark_non_differentiable(log_probs, entropy)
        return log_probs, entropy, log_probs.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, __: Any, arriving: torch.Tensor) -> Any:
        return *hand_out(ctx, arriving, "separable_log_probs"), None, None


def run_rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    active: torch.Tensor,
    program: TokenProgram,
    fields: Mapping[str, torch.Tensor],
    *,
    scale: float,
    out: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`separable_rows` with the fastest kernels there are for these logits."""
    kernels = row_kernels_for(logits)
    options: dict[str, Any] = {"scale": scale, "with_entropy": True, "out": out}
    if kernels is cpu_extension:
        return cpu_extension.separable_rows(logits, targets, active, program, fields, **options)
    return separable_rows(kernels, logits, targets, active, program, fields, **options)


def hand_out(ctx: Any, arriving: torch.Tensor, function: str) -> list[torch.Tensor | None]:
    """What the forward pass of `function` left in `ctx.gradients` for `ctx.expected`, brought to what arrives; once."""
    if ctx.gradients is None:
        raise ConfigError(
            f"second backward pass through {function}: the gradient was handed out by the first. Use "
            "--separable-fast-path off to use the graph twice."
        )
    gradients, ctx.gradients = ctx.gradients, None
    for gradient in gradients:
        if gradient is not None:
            _rescale(gradient, arriving, ctx.expected)
    return gradients


def _rescale(gradient: torch.Tensor, arriving: torch.Tensor, expected: float) -> None:
    """Multiply by arriving / expected, unless that is 1."""
    ratio = arriving.double() / expected
    if gradient.device.type == "cuda":
        # Without asking the device, which would stop the host until it is done: a kernel that looks itself.
        from plugin.logprobs.kernels.triton_rows import scale_unless_one

        scale_unless_one(gradient, ratio.float(), _ROUNDING)
    elif float(ratio) == 0.0:
        gradient.zero_()  # a loss that failed: 0, also where the gradient is not finite
    elif abs(float(ratio) - 1.0) > _ROUNDING:
        gradient.mul_(ratio.to(gradient.dtype))
