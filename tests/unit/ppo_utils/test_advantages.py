"""Advantage estimators, by hand."""

import math

import pytest
import torch

from plugin.config.loss.loss_config import ESTIMATOR_TRAITS
from plugin.errors import BatchError
from plugin.ppo_utils import (
    gae_advantages,
    grpo_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    reinforce_plus_plus_returns,
    rloo_advantages,
    spread_over_tokens,
    whiten,
)
from plugin.ppo_utils.advantages import ESTIMATORS, discounted_suffix_sums

REWARDS = torch.tensor([1.0, 2.0, 6.0, 5.0])
GROUPS = torch.tensor([0, 0, 0, 1])


def test_grpo_subtracts_the_mean_and_divides_by_the_unbiased_std() -> None:
    # group 0: mean 3, deviations -2, -1, 3; variance (4 + 1 + 9) / 2 = 7; a group of one has advantage 0
    s = math.sqrt(7.0) + 1e-6
    expected = torch.tensor([-2 / s, -1 / s, 3 / s, 0.0])
    torch.testing.assert_close(grpo_advantages(REWARDS, GROUPS), expected)


def test_grpo_without_std_only_subtracts_the_mean() -> None:
    result = grpo_advantages(REWARDS, GROUPS, std_normalization=False)
    torch.testing.assert_close(result, torch.tensor([-2.0, -1.0, 3.0, 0.0]))


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7, 123.456])
@pytest.mark.parametrize("size", [3, 5, 7, 8])
def test_a_group_of_equal_rewards_teaches_nothing(reward: float, size: int) -> None:
    rewards, group = torch.full((size,), reward), torch.zeros(size, dtype=torch.int64)
    assert grpo_advantages(rewards, group).abs().max() < 1e-6
    assert rloo_advantages(rewards, group).abs().max() < 1e-6


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    # 1 - (2 + 6) / 2 = -3; 2 - (1 + 6) / 2 = -1.5; 6 - (1 + 2) / 2 = 4.5; alone: 0
    torch.testing.assert_close(
        rloo_advantages(REWARDS, GROUPS), torch.tensor([-3.0, -1.5, 4.5, 0.0])
    )


@pytest.mark.parametrize("estimator", [grpo_advantages, rloo_advantages])
def test_group_indices_are_names_and_may_be_sparse_negative_or_huge(estimator) -> None:  # type: ignore[no-untyped-def]
    renamed = torch.tensor([10**12, 10**12, 10**12, -7])
    assert estimator(REWARDS, renamed).tolist() == estimator(REWARDS, GROUPS).tolist()


@pytest.mark.parametrize("estimator", [grpo_advantages, rloo_advantages])
def test_no_samples_give_no_advantages(estimator) -> None:  # type: ignore[no-untyped-def]
    empty = estimator(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert empty.shape == (0,) and empty.dtype == torch.float32


def test_every_reward_needs_its_group_index() -> None:
    with pytest.raises(BatchError, match="one group index per reward"):
        grpo_advantages(REWARDS, GROUPS[:2])
    with pytest.raises(BatchError, match="one group index per reward"):
        rloo_advantages(REWARDS, GROUPS[:2])


def test_reinforce_plus_plus_discounts_over_unmasked_tokens_only() -> None:
    # steps are tokens 0, 2, 3; gamma 0.5: reward 8 arrives at token 3 -> 2, 4, 8; token 1 is no step
    mask = torch.tensor([1, 0, 1, 1])
    (returns,) = reinforce_plus_plus_returns(torch.tensor([8.0]), [mask], gamma=0.5)
    assert returns.tolist() == [2.0, 0.0, 4.0, 8.0]


def test_reinforce_plus_plus_charges_the_kl_of_each_token() -> None:
    # gamma 1, coefficient 0.1: step rewards -0.1, -0.2, 8 - 0.3 = 7.7 -> suffix sums 7.4, 7.5, 7.7
    mask, kl = torch.tensor([1, 1, 0, 1]), torch.tensor([1.0, 2.0, math.nan, 3.0])
    (returns,) = reinforce_plus_plus_returns(torch.tensor([8.0]), [mask], kl=[kl], kl_coef=0.1)
    torch.testing.assert_close(returns, torch.tensor([7.4, 7.5, 0.0, 7.7]))


def test_reinforce_plus_plus_whitens_the_returns() -> None:
    # returns 1, 1 and 4: mean 2, variance (1 + 1 + 4) / 2 = 3
    masks = [torch.tensor([1, 1]), torch.tensor([1, 0])]
    first, second = reinforce_plus_plus_advantages(torch.tensor([1.0, 4.0]), masks)
    s = math.sqrt(3.0)
    torch.testing.assert_close(first, torch.tensor([-1 / s, -1 / s]))
    torch.testing.assert_close(second, torch.tensor([2 / s, 0.0]))


def test_reinforce_plus_plus_baseline_centers_in_the_group_then_whitens() -> None:
    # centered 1 - 2 = -1 (one token), 3 - 2 = 1 (two tokens): mean 1/3, variance (16/9 + 4/9 + 4/9) / 2 = 4/3
    masks = [torch.tensor([1]), torch.tensor([1, 1])]
    result = reinforce_plus_plus_baseline_advantages(
        torch.tensor([1.0, 3.0]), torch.tensor([5, 5]), masks
    )
    s = math.sqrt(4 / 3)
    torch.testing.assert_close(result[0], torch.tensor([-4 / 3 / s]))
    torch.testing.assert_close(result[1], torch.tensor([2 / 3 / s, 2 / 3 / s]))


def test_gae_by_hand() -> None:
    # gamma 0.5, lambda 0.5, V = 1, 2, 4 (token 1 masked, holds NaN), reward 10 at the end.
    # delta: 0.5 * 2 - 1 = 0; 0.5 * 4 - 2 = 0; 10 - 4 = 6
    # A: 6; 0 + 0.25 * 6 = 1.5; 0 + 0.25 * 1.5 = 0.375; returns A + V
    mask = torch.tensor([1, 0, 1, 1])
    values = torch.tensor([1.0, math.nan, 2.0, 4.0])
    advantages, returns = gae_advantages(
        torch.tensor([10.0]), [values], [mask], gamma=0.5, lambd=0.5
    )
    assert advantages[0].tolist() == [0.375, 0.0, 1.5, 6.0]
    assert returns[0].tolist() == [1.375, 0.0, 3.5, 10.0]


def test_gae_with_lambda_one_and_gamma_one_is_reward_minus_value() -> None:
    values = torch.tensor([0.25, -1.0, 3.0])
    advantages, _ = gae_advantages(torch.tensor([2.0]), [values], [torch.ones(3)])
    torch.testing.assert_close(advantages[0], 2.0 - values)


def test_gae_and_lambda_returns_are_their_definitions_in_float64() -> None:
    generator = torch.Generator().manual_seed(4)
    masks = [torch.rand(n, generator=generator) > 0.3 for n in (7, 1, 40)]
    values = [torch.randn(len(m), generator=generator, dtype=torch.float64) for m in masks]
    rewards = torch.randn(3, generator=generator, dtype=torch.float64)
    gamma, lambd = 0.97, 0.9
    advantages, returns = gae_advantages(rewards, values, masks, gamma=gamma, lambd=lambd)
    for sample, (mask, value) in enumerate(zip(masks, values, strict=True)):
        steps = value[mask].tolist()
        rows = [*[0.0] * (len(steps) - 1), float(rewards[sample])] if steps else []
        for t in range(len(steps)):
            # n-step returns R_n = sum of gamma^k r + gamma^n V, mixed with (1 - lambda) lambda^(n-1)
            total, left = 0.0, len(steps) - t
            for n in range(1, left + 1):
                reward = sum(gamma**k * rows[t + k] for k in range(n))
                n_step = reward + (gamma**n * steps[t + n] if n < left else 0.0)
                total += n_step * lambd ** (n - 1) * (1 - lambd if n < left else 1)
            assert float(returns[sample][mask][t]) == pytest.approx(total, rel=1e-12)
            assert float(advantages[sample][mask][t]) == pytest.approx(total - steps[t], rel=1e-9)


def test_gae_of_empty_and_fully_masked_samples_is_zero() -> None:
    values = [torch.zeros(0), torch.tensor([math.nan, math.inf])]
    advantages, returns = gae_advantages(
        torch.tensor([1.0, 2.0]), values, [torch.zeros(0), torch.zeros(2)]
    )
    assert [a.tolist() for a in advantages] == [[], [0.0, 0.0]]
    assert [r.tolist() for r in returns] == [[], [0.0, 0.0]]


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 300])
@pytest.mark.parametrize("discount", [0.0, 0.5, 0.99, 1.0])
def test_suffix_sums_equal_the_step_by_step_recursion(length: int, discount: float) -> None:
    values = torch.randn(length, generator=torch.Generator().manual_seed(length))
    expected, carry = [0.0] * length, 0.0
    for t in reversed(range(length)):
        carry = float(values[t]) + discount * carry
        expected[t] = carry
    torch.testing.assert_close(
        discounted_suffix_sums(values, discount),
        torch.tensor(expected, dtype=torch.float64),
        rtol=1e-5,
        atol=1e-5,
    )


def test_whitening_ignores_masked_tokens_and_uses_the_unbiased_variance() -> None:
    # unmasked 1, 3, 5: mean 3, variance (4 + 0 + 4) / 2 = 4
    values = [torch.tensor([1.0, math.nan]), torch.tensor([3.0, 5.0, math.inf])]
    masks = [torch.tensor([1, 0]), torch.tensor([1, 1, 0])]
    first, second = whiten(values, masks)
    torch.testing.assert_close(first, torch.tensor([-1.0, 0.0]))
    torch.testing.assert_close(second, torch.tensor([0.0, 1.0, 0.0]))


def test_whitening_without_shift_keeps_the_mean() -> None:
    # (1 - 3) / 2 + 3 = 2, (3 - 3) / 2 + 3 = 3, (5 - 3) / 2 + 3 = 4
    (result,) = whiten([torch.tensor([1.0, 3.0, 5.0])], [torch.ones(3)], shift_mean=False)
    torch.testing.assert_close(result, torch.tensor([2.0, 3.0, 4.0]))


def test_whitening_keeps_a_small_variance_on_a_large_mean() -> None:
    # 1e4 + {-1, 0, 1}: a float32 sum of squares (3e8) would lose the variance of 1
    (result,) = whiten([torch.tensor([9999.0, 10000.0, 10001.0])], [torch.ones(3)])
    torch.testing.assert_close(result, torch.tensor([-1.0, 0.0, 1.0]))


@pytest.mark.parametrize("masks", [[], [torch.zeros(2)], [torch.tensor([1, 0])]])
def test_whitening_nothing_one_token_or_constants_gives_zeros(masks: list[torch.Tensor]) -> None:
    result = whiten([torch.full((2,), 5.0) for _ in masks], masks)
    assert [r.tolist() for r in result] == [[0.0, 0.0] for _ in masks]


def test_spreading_gives_every_unmasked_token_its_samples_value() -> None:
    result = spread_over_tokens(torch.tensor([2.0, -1.0, 4.0]), [
        torch.tensor([1, 0, 1]), torch.zeros(0), torch.tensor([0, 1])
    ])  # fmt: skip
    assert [r.tolist() for r in result] == [[2.0, 0.0, 2.0], [], [0.0, 4.0]]


def test_mismatched_lengths_are_batch_errors() -> None:
    two, three = torch.ones(2), torch.ones(3)
    one_reward = torch.tensor([1.0])
    with pytest.raises(BatchError, match="one per sample"):
        spread_over_tokens(torch.tensor([1.0, 2.0]), [two])
    with pytest.raises(BatchError, match=r"values have lengths \[3\].*\[2\]"):
        whiten([three], [two])
    with pytest.raises(BatchError, match=r"values have lengths \[3\].*\[2\]"):
        gae_advantages(one_reward, [three], [two])
    with pytest.raises(BatchError, match=r"kl have lengths \[3\].*\[2\]"):
        reinforce_plus_plus_returns(one_reward, [two], kl=[three], kl_coef=1.0)
    with pytest.raises(BatchError, match="one per sample"):
        reinforce_plus_plus_returns(torch.tensor([1.0, 2.0]), [two])
    with pytest.raises(BatchError, match="one per sample"):
        gae_advantages(torch.tensor([1.0, 2.0]), [two], [two])


def test_every_estimator_without_a_value_model_is_in_the_table() -> None:
    traits = ESTIMATOR_TRAITS.items()
    assert set(ESTIMATORS) == {n for n, t in traits if not (t.values or t.parts)}
