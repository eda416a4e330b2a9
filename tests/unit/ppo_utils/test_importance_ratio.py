"""Ratios in log space: values, bounds, inclusive band edges."""

import math

import pytest
import torch

from plugin.ppo_utils import (
    SequenceShards,
    clipped_ratio,
    geometric_log_ratio,
    inside_band,
    log_ratio,
    probability_difference,
    safe_exp,
    sequence_log_ratio,
)

ALL = torch.tensor([True, True, True])


def test_log_ratio_is_the_difference_and_zero_where_masked() -> None:
    numerator = torch.tensor([-1.0, math.nan, -3.0])
    denominator = torch.tensor([-1.5, -math.inf, -1.0])
    mask = torch.tensor([True, False, True])
    assert log_ratio(numerator, denominator, mask).tolist() == [0.5, 0.0, -2.0]


def test_an_infinite_difference_of_two_masked_infinities_is_never_formed() -> None:
    infinite = torch.full((3,), -math.inf, requires_grad=True)
    result = log_ratio(infinite, infinite, ~ALL)
    result.sum().backward()
    assert result.tolist() == [0.0, 0.0, 0.0]
    assert infinite.grad is not None and infinite.grad.tolist() == [0.0, 0.0, 0.0]


def test_safe_exp_is_bounded_on_both_sides_and_flat_beyond() -> None:
    values = torch.tensor([-1e4, 0.0, math.log(3.0), 1e4], requires_grad=True)
    result = safe_exp(values)
    result.sum().backward()
    expected = torch.tensor([math.exp(-20), 1.0, 3.0, math.exp(20)])
    torch.testing.assert_close(result, expected)
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([0.0, 1.0, 3.0, 0.0]))


@pytest.mark.parametrize("low, high", [(0.2, 5.0), (0.5, 2.0), (0.1, 10.0), (0.7, 1.3)])
@pytest.mark.parametrize("base", [0.0, -1.0, -9.7])
def test_both_edges_of_a_band_are_inside(low: float, high: float, base: float) -> None:
    # exp(log 0.2) rounds below 0.2 in float32, so a comparison of ratios would drop the edge.
    numerator = torch.tensor([base + math.log(low), base, base + math.log(high)])
    log_r = log_ratio(numerator, torch.full((3,), base), ALL)
    assert inside_band(log_r, low, high).tolist() == [True, True, True]


def test_just_outside_a_band_is_outside() -> None:
    log_r = torch.tensor([math.log(0.2 * 0.9999), math.log(5.0 * 1.0001)])
    assert inside_band(log_r, 0.2, 5.0).tolist() == [False, False]


def test_a_lower_bound_of_zero_is_no_bound() -> None:
    assert inside_band(torch.tensor([-1e4]), 0.0, 2.0).tolist() == [True]


def test_clipped_ratio_clips_without_overflow() -> None:
    log_r = torch.tensor([-1e4, math.log(0.3), 0.0, math.log(1.9), 1e4])
    torch.testing.assert_close(
        clipped_ratio(log_r, 0.5, 1.5), torch.tensor([0.5, 0.5, 1.0, 1.5, 1.5])
    )


def test_sequence_and_geometric_level_use_unmasked_tokens_of_each_sample() -> None:
    # sample 0: log-ratios 0.3, masked, 0.1 -> sum 0.4, mean 0.2; sample 1: -0.5 -> sum and mean -0.5
    shards = SequenceShards.of(None, [3, 1], torch.device("cpu"))
    mask = torch.tensor([True, False, True, True])
    log_r = torch.tensor([0.3, 0.0, 0.1, -0.5])
    torch.testing.assert_close(sequence_log_ratio(log_r, shards), torch.tensor([0.4, -0.5]))
    torch.testing.assert_close(geometric_log_ratio(log_r, mask, shards), torch.tensor([0.2, -0.5]))


def test_the_geometric_level_of_a_sample_without_tokens_is_a_ratio_of_one() -> None:
    shards = SequenceShards.of(None, [2, 0], torch.device("cpu"))
    mask = torch.zeros(2, dtype=torch.bool)
    assert geometric_log_ratio(torch.zeros(2), mask, shards).tolist() == [0.0, 0.0]


def test_probability_difference_is_exact_and_masked() -> None:
    first = torch.tensor([math.log(0.7), math.nan, math.log(0.1)], requires_grad=True)
    second = torch.tensor([math.log(0.5), 1e30, math.log(0.4)])
    mask = torch.tensor([True, False, True])
    difference = probability_difference(first, second, mask)
    torch.testing.assert_close(difference, torch.tensor([0.2, 0.0, -0.3]))
    assert not difference.requires_grad
