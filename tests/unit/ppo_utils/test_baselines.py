"""Baselines of groups: Dr. GRPO, OPO and leave-one-out in its variants, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugin.config import JobConfig
from plugin.errors import BatchError, ConfigError
from plugin.ppo_utils.advantages import (
    ESTIMATORS,
    best_of_group_advantages,
    gdpo_advantages,
    grpo_advantages,
    maxrl_advantages,
    opo_advantages,
    rloo_advantages,
)

#: A group of four with one success, and a group of two.
REWARDS = torch.tensor([1.0, 0.0, 0.0, 0.0, 2.0, 4.0])
GROUPS = torch.tensor([5, 5, 5, 5, 1, 1])


def estimated(name: str, masks: list[list[int]] | None = None, **flags: Any) -> list[float]:
    """The advantage of every sample's first token."""
    columns = [torch.tensor(mask) for mask in masks or [[1]] * 6]
    config = JobConfig(advantage_estimator=name, **flags)
    return [float(a[0]) for a in ESTIMATORS[name](REWARDS, GROUPS, columns, config)]


def test_dr_grpo_is_the_difference_from_the_group_mean_without_a_deviation() -> None:
    # means 0.25 and 3
    assert estimated("dr_grpo") == pytest.approx([0.75, -0.25, -0.25, -0.25, -1, 1])
    assert estimated("dr_grpo") == estimated("grpo", grpo_std_normalization=False)


def test_opo_weights_the_baseline_by_the_tokens_that_the_policy_chose() -> None:
    # group 5: lengths 3, 1, 1, 1 (a masked token does not count): 3 * 1 / 6 = 0.5
    # group 1: lengths 1, 3: (1 * 2 + 3 * 4) / 4 = 3.5
    masks = [[1, 0, 1, 1], [1], [1], [1], [1], [1, 1, 1]]
    assert estimated("opo", masks) == pytest.approx([0.5, -0.5, -0.5, -0.5, -1.5, 0.5])


def test_opo_with_equal_lengths_is_dr_grpo() -> None:
    assert estimated("opo") == pytest.approx(estimated("dr_grpo"))
    empty = opo_advantages(REWARDS, GROUPS, torch.zeros(6))
    assert bool(empty.isfinite().all()), "a group without a token of its own"


@pytest.mark.parametrize(
    "std, expected",
    [
        # 1 - 0; 0 - 1/3; 2 - 4; 4 - 2
        ("none", [1, -1 / 3, -1 / 3, -1 / 3, -2, 2]),
        # deviations 0.5 (0.75 / 3 = 0.25) and sqrt 2
        ("group", [2, -2 / 3, -2 / 3, -2 / 3, -(2**0.5), 2**0.5]),
        # others of the success: all 0, so undivided; of a failure: 1, 0, 0 with variance 1/3; of two: one value
        ("others", [1, -(3**-0.5), -(3**-0.5), -(3**-0.5), -2, 2]),
        # (1 + 3/9 + 4 + 4) / 5 = 28/15, its root 1.36626
        ("batch", [0.731925, -0.243975, -0.243975, -0.243975, -1.46385, 1.46385]),
    ],
)
def test_leave_one_out_and_what_divides_it(std: str, expected: list[float]) -> None:
    assert estimated("rloo", rloo_std=std) == pytest.approx(expected, rel=1e-5)


@given(
    rewards=st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, -7.7]), min_size=3, max_size=9),
    std=st.sampled_from(["none", "group", "others"]),
)
@settings(max_examples=80, deadline=None)
def test_leave_one_out_is_what_leaving_one_out_gives(rewards: list[float], std: str) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    found = rloo_advantages(values, torch.zeros(len(rewards), dtype=torch.int64), std=std)  # type: ignore[arg-type]
    for i, advantage in enumerate(found.tolist()):
        others = torch.cat([values[:i], values[i + 1 :]])
        expected = float(values[i] - others.mean())
        spread = float((values if std == "group" else others).std()) if std != "none" else 0.0
        if spread > 1e-9:
            expected /= spread + 1e-6
        assert advantage == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_a_group_without_spread_teaches_nothing() -> None:
    equal, group = torch.full((7,), 0.1), torch.zeros(7, dtype=torch.int64)
    for std in ("none", "group", "others", "batch"):
        assert float(rloo_advantages(equal, group, std=std).abs().max()) < 1e-9  # type: ignore[arg-type]
    assert float(opo_advantages(equal, group, torch.arange(7)).abs().max()) < 1e-9
    assert rloo_advantages(
        torch.ones(1), torch.zeros(1, dtype=torch.int64), std="others"
    ).tolist() == [0]


def test_baselines_that_cannot_be_are_refused() -> None:
    with pytest.raises(BatchError, match="one group index per reward"):
        opo_advantages(REWARDS, GROUPS[:3], torch.ones(6))
    for name in ("dr_grpo", "opo", "rloo"):
        with pytest.raises(ConfigError, match="a group of one has no baseline"):
            JobConfig(advantage_estimator=name, n_samples_per_prompt=1)
    with pytest.raises(ConfigError, match="--rloo-std group would do nothing"):
        JobConfig.from_sources({"rloo_std": "group", "advantage_estimator": "opo"})


def test_maxrl_divides_by_the_mean_reward_of_the_group() -> None:
    # means 0.25 and 3: 0.75 / 0.25, -0.25 / 0.25, -1 / 3, 1 / 3
    assert estimated("maxrl") == pytest.approx([3, -1, -1, -1, -1 / 3, 1 / 3], rel=1e-5)


def test_maxrl_of_a_group_without_a_success_is_zero_and_of_negative_rewards_refused() -> None:
    group = torch.tensor([0, 0])
    assert maxrl_advantages(torch.zeros(2), group).tolist() == [0.0, 0.0]
    with pytest.raises(BatchError, match=r"one reward is -1\.0; rewards must be at least 0"):
        maxrl_advantages(torch.tensor([1.0, -1.0]), group)


def test_gdpo_normalizes_every_reward_by_itself_and_then_the_sum() -> None:
    # rewards 1, 0, 1, 0 and 0, 100, 100, 0: both are -+0.866 after their own deviation; weights 1 and 2:
    # -0.866, 0.866, 2.598, -2.598, whose deviation is sqrt(15 / 3) = 2.2361
    rewards = torch.tensor([[1.0, 0.0], [0.0, 100.0], [1.0, 100.0], [0.0, 0.0]])
    one_group = torch.zeros(4).long()
    found = gdpo_advantages(rewards, one_group, [1.0, 2.0]).tolist()
    assert found == pytest.approx([-0.3873, 0.3873, 1.1619, -1.1619], abs=1e-4)
    # Two prompts without a difference inside: nothing is learned, whatever the rewards.
    apart = gdpo_advantages(torch.tensor([[0.1, 3.0]] * 3), torch.tensor([4, 4, 9]), [1.0, 1.0])
    assert apart.tolist() == [0.0, 0.0, 0.0]
    assert gdpo_advantages(torch.zeros(0, 2), torch.zeros(0).long(), [1.0, 1.0]).tolist() == []


def test_gdpo_tells_responses_apart_that_earn_the_same_sum() -> None:
    # two right ones of four, one short one: sums 1, 1, 1, 0, of which GRPO makes three equal advantages
    rewards = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    groups = torch.zeros(4).long()
    found = gdpo_advantages(rewards, groups, [1.0, 1.0])
    # 0.866 - 0.5 = 0.366, twice; -0.866 + 1.5 = 0.634; -0.866 - 0.5 = -1.366; deviation 0.9194
    assert found.tolist() == pytest.approx([0.3981, 0.3981, 0.6896, -1.4858], abs=1e-4)
    sums = grpo_advantages(rewards.sum(1), groups)
    assert float(sums[:3].max() - sums[:3].min()) < 1e-6


def test_best_of_group_rewards_only_what_lifts_the_maximum() -> None:
    # 1 - 0 and 4 - 2; a group of one has no second best; equal bests gain nothing
    assert estimated("best_of_group", grpo_std_normalization=False) == [1, 0, 0, 0, 0, 2]
    # deviations 0.5 and sqrt 2
    expected = [2, 0, 0, 0, 0, 2 / 2**0.5]
    assert estimated("best_of_group") == pytest.approx(expected, rel=1e-5)
    rewards, groups = torch.tensor([3.0, 3.0, 1.0, 7.0]), torch.tensor([0, 0, 0, 9])
    found = best_of_group_advantages(rewards, groups, std_normalization=False)
    assert found.tolist() == [0, 0, 0, 0]


def test_best_of_group_has_the_gradient_of_pass_at_k() -> None:
    """Exact expectation over all pairs of a policy with three answers, rewards 0, 0.5 and 1."""
    theta = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    worth = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    log_p = theta.log_softmax(0)
    surrogate = best = theta.new_zeros(())
    for i in range(3):
        for j in range(3):
            pair = worth[[i, j]]
            found = best_of_group_advantages(pair, torch.zeros(2).long(), std_normalization=False)
            chance = (log_p[i] + log_p[j]).exp()
            surrogate = surrogate + chance.detach() * (found[0] * log_p[i] + found[1] * log_p[j])
            best = best + chance * pair.max()
    (of_surrogate,) = torch.autograd.grad(surrogate, theta, retain_graph=True)
    (of_best,) = torch.autograd.grad(best, theta)
    torch.testing.assert_close(of_surrogate, of_best)
