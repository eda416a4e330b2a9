"""Draws tokens and reports the log-prob of exactly the distribution they were drawn from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from plugin.engines.protocol import SamplingParameters

#: A nucleus is looked for among so many tokens first; sorting a whole vocabulary takes longer.
_LIKELIEST = 256
#: Neighboring tokens whose probabilities are summed before any of them is looked at.
_WIDTH = 128


def sampling_log_probs(logits: Tensor, parameters: SamplingParameters) -> Tensor:
    """[B, V] float32 log-probs after temperature and truncation; -inf where truncated.

    Min-p is applied first, then top-k, then top-p; ties at the edge are all kept. The likeliest
    token always survives.
    """
    logits = logits.float()
    if parameters.temperature != 1:
        logits = logits / parameters.temperature
    log_probs = torch.log_softmax(logits, dim=-1)
    if parameters.top_k is None and parameters.top_p >= 1 and not parameters.min_p:
        return log_probs
    kept = torch.ones_like(log_probs, dtype=torch.bool)
    if parameters.min_p:
        kept &= log_probs >= log_probs.amax(-1, keepdim=True) + math.log(parameters.min_p)
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
    probabilities = torch.softmax(log_probs, dim=-1)
    for count in (min(_LIKELIEST, log_probs.shape[-1]), log_probs.shape[-1]):
        ordered, order = probabilities.topk(count, dim=-1)
        reached = ordered.cumsum(-1)
        if bool((reached[:, -1] >= top_p).all()):
            break
    kept = torch.zeros_like(probabilities, dtype=torch.bool)
    return kept.scatter(-1, order, reached - ordered < top_p)


def draw(log_probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B] and their log-probs [B]: the quantiles at `uniforms` [B] float64 in [0, 1).

    In float64, over sums of `_WIDTH` neighbors first and then within the one that the quantile is
    in.
    """
    probabilities, missing = log_probs.exp(), -log_probs.shape[-1] % _WIDTH
    if missing:  # padding copies, also by 0
        probabilities = pad(probabilities, (0, missing))
    blocks = probabilities.unflatten(-1, (-1, _WIDTH))
    ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    block, target = _quantile(ends, uniforms.unsqueeze(-1) * ends[:, -1:])
    before = pad(ends, (1, 0)).gather(-1, block)
    within = blocks[torch.arange(len(blocks), device=block.device), block.squeeze(-1)]
    place, _ = _quantile(within.cumsum(-1, dtype=torch.float64), target - before)
    tokens = block * _WIDTH + place
    return tokens.squeeze(-1), log_probs.gather(-1, tokens).squeeze(-1)


def _quantile(cumulative: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """[B, 1] the first of `cumulative` [B, n] above `target` [B, 1], and the target in float64.

    A target that rounding pushed onto the total is below it: what is found has probability.
    """
    total = cumulative[:, -1:]
    target = torch.minimum(target, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True), target


def uniform_rows(seeds: Sequence[int], length: int) -> Tensor:
    """[len(seeds), length] float64 numbers in [0, 1); a row depends on its seed only."""
    rows = [
        torch.rand(length, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for seed in seeds
    ]
    return torch.stack(rows) if rows else torch.empty(0, length, dtype=torch.float64)
