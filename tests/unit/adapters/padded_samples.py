"""A padded batch of two samples, as the frameworks that pad hold it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Responses of 3 and 2 tokens, the middle token of the first one from a tool; R = 4.
MASK = torch.tensor([[1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
ADVANTAGES = torch.tensor([[1.5] * 4, [-0.5] * 4])


def log_probs(seed: int) -> Tensor:
    """[2, 4] plausible log-probs."""
    generator = torch.Generator().manual_seed(seed)
    return -3 + 0.4 * torch.randn(2, 4, generator=generator)


def three_policies() -> dict[str, Tensor]:
    """cur (with gradient), train and rollout, near each other."""
    return {
        "cur": log_probs(0).requires_grad_(),
        "train": log_probs(0) + 0.3 * (log_probs(1) + 3),
        "rollout": log_probs(0) + 0.9 * (log_probs(2) + 3),
    }


def spoiled(values: Tensor) -> Tensor:
    """`values` with NaN, inf and a sentinel wherever the mask is 0."""
    garbage = torch.tensor([float("nan"), float("-inf"), 1e30, float("inf")])
    return torch.where(MASK != 0, values.detach(), garbage.expand(2, 4))


def token_mean(values: Tensor) -> Tensor:
    return values.sum() / MASK.sum()


def gradient(loss: Tensor, cur: Tensor) -> Tensor:
    (result,) = torch.autograd.grad(loss, cur, retain_graph=True)
    return result


def assert_same(mine: tuple[Tensor, Any], theirs: tuple[Tensor, Any], cur: Tensor) -> None:
    """Same loss and same gradient with respect to `cur`."""
    torch.testing.assert_close(mine[0].float(), theirs[0].float())
    torch.testing.assert_close(gradient(mine[0], cur), gradient(theirs[0], cur))
