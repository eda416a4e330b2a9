"""A small causal transformer that adds, once per seed: all seeds of a run are one stack of weights [seeds, ...].

At place i it reads the column of digits a_i, b_i and the digit it has just written, attends to the places before, and
gives logits of the next digit. Its feed-forward part is one network or, as a mixture, 8 of which a router takes 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plugin.engines.transformers.linear_layers import through_int8

LENGTH, WIDTH, HEADS, HIDDEN = 8, 32, 2, 64
EXPERTS, EXPERT_HIDDEN, ROUTES = 8, 16, 2
#: Rows of the embedding: ten digits of each number, ten written ones, and "nothing written yet".
ROWS, NOTHING = 31, 10
#: [places, places]: what lies after a place and is not read.
_AFTER = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
_QUANTIZED = ("qkv", "out", "up", "down")


@dataclass
class Cache:
    """Keys and values [2, rows, heads, LENGTH, width] of the places decoded so far, `places` of them."""

    held: Tensor | None = None
    places: int = 0

    def append(self, new: Tensor) -> Tensor:
        """Add [2, rows, heads, 1, width]; return all so far."""
        if self.held is None:
            self.held = new.new_empty(*new.shape[:3], LENGTH, new.shape[-1])
        self.held[:, :, :, self.places] = new[:, :, :, 0]
        self.places += 1
        return self.held[:, :, :, : self.places]


class StackedAdder(nn.Module):
    """`seeds` independent policies in one; every parameter has them as its first dimension."""

    def __init__(self, seeds: int, *, mixture: bool) -> None:
        super().__init__()
        hidden = EXPERTS * EXPERT_HIDDEN if mixture else HIDDEN

        def weight(*shape: int, scale: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(seeds, *shape) * scale)

        self.embed = weight(ROWS, WIDTH, scale=0.3)
        self.place = weight(LENGTH, WIDTH, scale=0.3)
        self.qkv = weight(WIDTH, 3 * WIDTH, scale=WIDTH**-0.5)
        self.out = weight(WIDTH, WIDTH, scale=WIDTH**-0.5)
        self.up = weight(WIDTH, hidden, scale=WIDTH**-0.5)
        self.down = weight(hidden, WIDTH, scale=hidden**-0.5)
        self.head = weight(WIDTH, 10, scale=WIDTH**-0.5)
        self.router = weight(WIDTH, EXPERTS, scale=WIDTH**-0.5) if mixture else None

    def forward(
        self, seen: Tensor, cache: Cache | None = None, routes: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [seeds, samples, n, 10] and the experts taken [seeds, samples * n, ROUTES], or None.

        seen: [seeds, samples, n, 3] digits and the last one written, of n places: the next one of `cache`, or all
        routes: experts to take instead of the router's choice
        """
        seeds, samples, n, _ = seen.shape
        start = 0 if cache is None else cache.places
        rows = seen + torch.tensor([0, 10, 20]) + ROWS * torch.arange(seeds)[:, None, None, None]
        x = F.embedding(rows, self.embed.flatten(0, 1)).sum(-2)
        x = (x + self.place[:, None, start : start + n]).flatten(1, 2)
        qkv = torch.bmm(_norm(x), self.qkv).view(seeds * samples, n, 3, HEADS, WIDTH // HEADS)
        qkv = qkv.permute(2, 0, 3, 1, 4)
        query, (key, value) = qkv[0], qkv[1:] if cache is None else cache.append(qkv[1:])
        scores = query @ key.mT * (WIDTH // HEADS) ** -0.5
        if cache is None:
            scores = scores.masked_fill(_AFTER[:n, :n], -torch.inf)
        read = scores.softmax(-1) @ value
        x = x + torch.bmm(read.transpose(1, 2).reshape(seeds, samples * n, WIDTH), self.out)
        update, taken = self._feed_forward(_norm(x), routes)
        logits = torch.bmm(_norm(x + update), self.head)
        return logits.view(seeds, samples, n, 10), taken

    def _feed_forward(self, x: Tensor, routes: Tensor | None) -> tuple[Tensor, Tensor | None]:
        hidden = torch.bmm(x, self.up).relu()
        if self.router is None:
            return torch.bmm(hidden, self.down), None
        scores = torch.bmm(x, self.router).softmax(-1)
        taken = scores.topk(ROUTES, -1).indices if routes is None else routes
        gates = scores.gather(-1, taken)
        gates = torch.zeros_like(scores).scatter(-1, taken, gates / gates.sum(-1, keepdim=True))
        weighted = hidden.unflatten(-1, (EXPERTS, EXPERT_HIDDEN)) * gates.unsqueeze(-1)
        return torch.bmm(weighted.flatten(-2), self.down), taken


def engine_weights(weights: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """What an engine of this precision holds; embedding, head and router of an int8 engine keep their dtype."""
    if kind == "bfloat16":
        return {name: value.bfloat16() for name, value in weights.items()}
    if kind == "int8":
        return {
            name: through_int8(value.mT).mT.contiguous() if name in _QUANTIZED else value
            for name, value in weights.items()
        }
    return weights


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,))
