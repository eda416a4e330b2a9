"""The loss of a value model, per token."""

from __future__ import annotations

import torch
from torch import Tensor

from plugin.ppo_utils.masked_ops import zero_masked


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Loss [T], 0 where masked, and whether each token's value was clipped, bool [T].

    max((v - R)^2, (old + clamp(v - old, -clip, clip) - R)^2) / 2: a value that has gone further
    than `clip` from where it was is not pushed on (PPO). Without `clip`, half the squared error.

    values: [T] with gradient; old_values, returns: [T]; mask: [T] bool
    """
    values, old, returns = (zero_masked(x, mask) for x in (values, old_values, returns))
    error = (values - returns).square()
    if clip is None:
        return 0.5 * error, torch.zeros_like(mask)
    near = old + (values - old).clamp(-clip, clip)
    clipped = (near - returns).square()
    # Inside the clip the two differ by rounding alone.
    left = (values - old).abs() > clip
    return 0.5 * torch.maximum(error, clipped), left & (clipped > error)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns), in float64; 0 where the returns do not vary.

    1 = the values predict every return, 0 = no better than their mean, below 0 = worse.
    """
    wanted, error = returns.double(), (returns.double() - values.double())
    if wanted.numel() < 2 or float(wanted.var()) == 0.0:
        return 0.0
    return float(1.0 - error.var() / wanted.var())
