"""The loss of a value model, by hand."""

from __future__ import annotations

import pytest
import torch

from plugin.loss.policy_losses import clipped_value_loss, explained_variance


def test_the_loss_of_a_value_that_went_too_far_is_that_of_the_clipped_one() -> None:
    values = torch.tensor([0.5, 1.5, -0.1], requires_grad=True)
    old, returns = torch.tensor([0.4, 1.0, 0.5]), torch.tensor([1.0, 2.0, 1.0])
    mask = torch.ones(3, dtype=torch.bool)
    loss, clipped = clipped_value_loss(values, old, returns, mask, 0.2)
    # 0: within 0.2 of 0.4: (0.5 - 1)^2 / 2 = 0.125
    # 1: 1.5 is clipped to 1.2: max(0.25, 0.64) / 2 = 0.32
    # 2: -0.1 is clipped to 0.3: max(1.21, 0.49) / 2 = 0.605: it went the wrong way
    torch.testing.assert_close(loss.detach(), torch.tensor([0.125, 0.32, 0.605]))
    assert clipped.tolist() == [False, True, False]
    loss.sum().backward()
    # v - R where not clipped, 0 where clipped
    torch.testing.assert_close(values.grad, torch.tensor([-0.5, 0.0, -1.1]))


def test_without_a_clip_it_is_half_the_squared_error() -> None:
    values, old, returns = torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([1.0])
    loss, clipped = clipped_value_loss(values, old, returns, torch.ones(1).bool(), None)
    assert loss.tolist() == [2.0] and not clipped.any()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_nothing_masked_is_computed_with(poison: float) -> None:
    values = torch.tensor([1.0, poison], requires_grad=True)
    other, mask = torch.tensor([0.0, poison]), torch.tensor([True, False])
    loss, clipped = clipped_value_loss(values, other, other, mask, 0.2)
    loss.sum().backward()
    assert loss.tolist() == [0.5, 0.0] and clipped.tolist() == [False, False]
    assert values.grad is not None and values.grad.tolist() == [1.0, 0.0]


def test_explained_variance_by_hand() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.full((4,), 7.0), returns) == 0.0
    # errors 0, 0.5, 1, 1.5: a quarter of the variance is left
    assert explained_variance(returns / 2, returns) == pytest.approx(0.75)
    assert explained_variance(returns, torch.ones(4)) == 0.0
