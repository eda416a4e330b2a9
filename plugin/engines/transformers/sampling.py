"""Draws tokens and reports the log-prob of exactly the distribution they were drawn from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plugin.engines.protocol import SamplingParameters


def sampling_log_probs(logits: Tensor, parameters: SamplingParameters) -> Tensor:
    """[B, V] float32 log-probs after temperature and truncation; -inf where truncated.

    top-k is applied before top-p; ties at the edge are all kept. The likeliest token always
    survives.
    """
    log_probs = torch.log_softmax(logits.float() / parameters.temperature, dim=-1)
    if parameters.top_k is None and parameters.top_p >= 1:
        return log_probs
    kept = torch.ones_like(log_probs, dtype=torch.bool)
    if parameters.top_k is not None and parameters.top_k < log_probs.shape[-1]:
        kept &= log_probs >= log_probs.topk(parameters.top_k, dim=-1).values[:, -1:]
    if parameters.top_p < 1:
        kept &= _nucleus(log_probs.masked_fill(~kept, -torch.inf), parameters.top_p)
    if bool(kept.all()):
        return log_probs
    return torch.log_softmax(log_probs.masked_fill(~kept, -torch.inf), dim=-1)


def kept_ids(log_probs: Tensor) -> list[Tensor]:
    """For each row of `sampling_log_probs` [B, V], the ids it kept, ascending; none = all of V."""
    kept = log_probs.isfinite()
    kept &= ~kept.all(-1, keepdim=True)
    ids = kept.nonzero()[:, 1].int()
    return list(ids.cpu().split(kept.sum(-1).tolist()))


def _nucleus(log_probs: Tensor, top_p: float) -> Tensor:
    """[B, V] whether a token is among the fewest whose probabilities reach `top_p`."""
    ordered, order = torch.log_softmax(log_probs, dim=-1).sort(dim=-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, before < top_p)


def draw(log_probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B] and their log-probs [B]: the quantiles at `uniforms` [B] float64 in [0, 1)."""
    cumulative = log_probs.exp().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Below the total, onto which rounding may push it: the token that reaches it has probability.
    target = torch.minimum(uniforms.unsqueeze(-1) * total, total.nextafter(torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target, right=True)
    return tokens.squeeze(-1), log_probs.gather(-1, tokens).squeeze(-1)


def uniform_rows(seeds: Sequence[int], length: int) -> Tensor:
    """[len(seeds), length] float64 numbers in [0, 1); a row depends on its seed only."""
    rows = [
        torch.rand(length, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for seed in seeds
    ]
    return torch.stack(rows) if rows else torch.empty(0, length, dtype=torch.float64)
