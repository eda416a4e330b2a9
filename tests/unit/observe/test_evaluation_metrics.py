"""pass@k against enumeration, intervals by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugin.observe.evaluation_metrics import (
    evaluation_metrics,
    interval,
    pass_at_k,
    wilson_interval,
)


@given(st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_responses_with_a_right_one(
    data: st.DataObject,
) -> None:
    right = data.draw(st.lists(st.booleans(), min_size=1, max_size=9))
    k = data.draw(st.integers(1, len(right)))
    choices = list(itertools.combinations(right, k))
    expected = sum(map(any, choices)) / len(choices)
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_of_many_responses_does_not_overflow() -> None:
    # 1 - C(1000, 500) / C(1001, 500) = 1 - 501 / 1001
    assert pass_at_k(1001, 1, 500) == pytest.approx(500 / 1001)
    assert pass_at_k(5, 0, 3) == 0.0 and pass_at_k(5, 3, 3) == 1.0


def test_wilsons_interval_by_hand() -> None:
    # 8 of 10, z^2 = 3.841459: shrink 1.3841459, center (0.8 + 0.192073) / 1.3841459 = 0.716740;
    # half 1.959964 / 1.3841459 * sqrt(0.16 / 10 + 3.841459 / 400) = 1.416010 * 0.160012 = 0.226578
    assert wilson_interval(0.8, 10) == pytest.approx((0.490162, 0.943318), abs=2e-6)
    # None of 1: 0 and z^2 / (1 + z^2) = 3.841459 / 4.841459.
    assert wilson_interval(0.0, 1) == pytest.approx((0.0, 0.793451), abs=1e-6)


def test_the_normal_interval_by_hand() -> None:
    # Mean 0.5; deviations 0.25, 0, -0.25: variance 0.125 / 2, error sqrt(0.0625 / 3) = 0.144338.
    low, high = interval(np.array([0.75, 0.5, 0.25])) or (0.0, 0.0)
    assert (low, high) == pytest.approx((0.5 - 0.282897, 0.5 + 0.282897), abs=1e-6)
    assert interval(np.array([0.5])) is None, "one prompt does not say how prompts differ"


@given(st.integers(0, 40), st.integers(1, 40))
def test_wilsons_interval_holds_its_share_and_stays_between_0_and_1(right: int, more: int) -> None:
    count = right + more
    low, high = wilson_interval(right / count, count)
    assert 0 <= low <= right / count <= high <= 1
    assert high - low > 0.0


def test_mean_and_pass_at_k_are_means_over_prompts() -> None:
    rewards = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.5, 0.0]]
    metrics = evaluation_metrics(rewards, pass_at=[1, 2, 4], pass_reward=1.0)
    assert metrics["mean"] == pytest.approx((0.5 + 0.125) / 2)
    # Prompt 1: 2 of 4 right: 1/2, 1 - 1/6, 1; prompt 2: none.
    assert metrics["pass@1"] == pytest.approx(0.25)
    assert metrics["pass@2"] == pytest.approx(5 / 12)
    assert metrics["pass@4"] == pytest.approx(0.5)
    # pass@4 is 1 and 0, so Wilson's of 1 of 2.
    assert (metrics["pass@4/ci_low"], metrics["pass@4/ci_high"]) == wilson_interval(0.5, 2)
    easier = evaluation_metrics(rewards, pass_at=[4], pass_reward=0.5)
    assert easier["pass@4"] == 1.0


def test_one_prompt_with_a_score_between_0_and_1_has_no_interval() -> None:
    metrics = evaluation_metrics([[0.25, 0.5]], pass_at=[1], pass_reward=1.0)
    assert metrics["mean"] == 0.375 and "mean/ci_low" not in metrics
    assert metrics["pass@1/ci_high"] == pytest.approx(0.793451, abs=1e-6)


def test_the_interval_of_a_probability_does_not_leave_0_to_1() -> None:
    # pass@1 of 1/2 and 1, 1, 1: mean 0.875, standard error 0.125, so 0.875 + 0.245 without a bound.
    rewards = [[0.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    metrics = evaluation_metrics(rewards, pass_at=[1], pass_reward=1.0)
    assert metrics["pass@1/ci_high"] == 1.0
    assert metrics["mean/ci_high"] == pytest.approx(1.119995, abs=1e-5)
