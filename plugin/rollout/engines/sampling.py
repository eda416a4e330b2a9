"""Draws tokens and reports the log-prob of exactly the distribution they were drawn from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plugin.rollout.engines.protocol import SamplingParameters


def sampling_log_probs(logits: Tensor, parameters: SamplingParameters) -> Tensor:
    """[B, V] float32 log-probs after temperature and truncation; -inf where truncated.

    top-k is applied before top-p; ties at the edge are all kept. The likeliest token always
    survives.
    """
    log_probs = torch.log_softmax(logits.float() / parameters.temperature, dim=-1)
    kept = torch.ones_like(log_probs, dtype=torch.bool)
    if parameters.top_k is not None and parameters.top_k < log_probs.shape[-1]:
        kept &= log_probs >= log_probs.topk(parameters.top_k, dim=-1).values[:, -1:]
    if parameters.top_p < 1:
        kept &= _nucleus(log_probs.masked_fill(~kept, -torch.inf), parameters.top_p)
    if bool(kept.all()):
        return log_probs
    return torch.log_softmax(log_probs.masked_fill(~kept, -torch.inf), dim=-1)


def _nucleus(log_probs: Tensor, top_p: float) -> Tensor:
    """[B, V] whether a token is among the fewest whose probabilities reach `top_p`."""
    ordered, order = torch.log_softmax(log_probs, dim=-1).sort(dim=-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, before < top_p)


def draw(log_probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B] and their log-probs [B]: the quantiles at `uniforms` [B] in [0, 1)."""
    cumulative = log_probs.double().exp().cumsum(-1)
    target = uniforms.double().unsqueeze(-1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)
    # Rounding may push the target onto the total: step back to the last token that has any
    # probability.
    last = log_probs.shape[-1] - 1 - log_probs.isfinite().flip(-1).int().argmax(-1, keepdim=True)
    tokens = torch.minimum(tokens, last)
    return tokens.squeeze(-1), log_probs.gather(-1, tokens).squeeze(-1)


def uniform_rows(seeds: Sequence[int], length: int) -> Tensor:
    """[len(seeds), length] float64 numbers in [0, 1); a row depends on its seed only."""
    rows = [
        torch.rand(length, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for seed in seeds
    ]
    return torch.stack(rows) if rows else torch.empty(0, length, dtype=torch.float64)
