"""KL estimators: values by hand, gradients, unbiasedness, bounds."""

import math

import pytest
import torch

from plugin.errors import ConfigError
from plugin.ppo_utils import KL_ESTIMATORS, kl_estimate

# d = log_probs - base = -1.0 - (-1.5) = 0.5 and -2.0 - (-1.0) = -1.0
LOG_PROBS, BASE = [-1.0, -2.0], [-1.5, -1.0]
BY_HAND = {
    "k1": [0.5, -1.0],
    "abs": [0.5, 1.0],
    "k2": [0.125, 0.5],  # 0.25 / 2, 1 / 2
    # exp(-0.5) - 1 + 0.5 = 0.60653066 - 0.5; exp(1) - 1 - 1 = 2.71828183 - 2
    "k3": [0.10653066, 0.71828183],
    "low_var_kl": [0.10653066, 0.71828183],
}
# derivative with respect to log_probs: 1; sign(d); d; 1 - exp(-d)
GRADIENTS = {
    "k1": [1.0, 1.0],
    "abs": [1.0, -1.0],
    "k2": [0.5, -1.0],
    "k3": [1 - 0.60653066, 1 - 2.71828183],
    "low_var_kl": [1 - 0.60653066, 1 - 2.71828183],
}


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_estimators_equal_their_formula_computed_by_hand(kind: str) -> None:
    mask = torch.tensor([True, True])
    values = kl_estimate(torch.tensor(LOG_PROBS), torch.tensor(BASE), mask, kind)
    torch.testing.assert_close(values, torch.tensor(BY_HAND[kind]))


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_gradients_of_estimators_equal_their_derivative(kind: str) -> None:
    log_probs = torch.tensor(LOG_PROBS, requires_grad=True)
    kl_estimate(log_probs, torch.tensor(BASE), torch.tensor([True, True]), kind).sum().backward()
    assert log_probs.grad is not None
    torch.testing.assert_close(log_probs.grad, torch.tensor(GRADIENTS[kind]))


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
@pytest.mark.parametrize("garbage", [math.nan, -math.inf, 1e30])
def test_masked_tokens_have_no_divergence_and_no_gradient(kind: str, garbage: float) -> None:
    log_probs = torch.tensor([-1.0, garbage], requires_grad=True)
    values = kl_estimate(
        log_probs, torch.tensor([-1.5, garbage]), torch.tensor([True, False]), kind
    )
    values.sum().backward()
    assert values[1].item() == 0.0
    assert log_probs.grad is not None and log_probs.grad[1].item() == 0.0


def test_k3_stays_finite_for_any_difference_and_exact_for_small_ones() -> None:
    mask = torch.tensor([True, True, True])
    values = kl_estimate(
        torch.tensor([-100.0, 0.0, -1e-4]), torch.tensor([0.0, -100.0, 0]), mask, "k3"
    )
    # bounded at d = -20: exp(20) - 1 - 20; at d = 20: exp(-20) - 1 + 20
    expected = [math.exp(20) - 21, math.exp(-20) + 19]
    torch.testing.assert_close(values[:2], torch.tensor(expected))
    # d = -1e-4: d^2/2 - d^3/6 = 5.000167e-9; the naive formula in float32 gives 0 or 1.2e-7
    assert values[2].item() == pytest.approx(5.000167e-9, rel=0.05)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_over_all_outcomes(kind: str) -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    mask = torch.ones(3, dtype=torch.bool)
    expected = (p * (p / q).log()).sum()  # KL(p || q), outcomes drawn from p
    estimate = (p * kl_estimate(p.log(), q.log(), mask, kind)).sum()
    torch.testing.assert_close(estimate, expected)


def test_an_unknown_estimator_is_a_config_error_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"'k9'.*k1, abs, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.bool), "k9")
