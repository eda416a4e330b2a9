"""How a batch is cut: complete, balanced, equal in number on every rank, within the budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugin.batch_types import RolloutBatch
from plugin.errors import BatchError, ConfigError
from plugin.megatron_backend.step.batch_share import cut_share
from plugin.megatron_backend.step.microbatching import (
    BatchingLimits,
    MicrobatchPlan,
    _Samples,
    plan_microbatches,
    sample_cost,
)
from tests.parallel.training_jobs import uneven_batch


def tokens_of(plan: MicrobatchPlan, lengths: list[int]) -> list[list[int]]:
    return [[sum(lengths[i] for i in samples) for samples in rank] for rank in plan.ranks]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    budget=st.one_of(st.none(), st.integers(1, 100)),
    size=st.integers(1, 5),
    dp_size=st.integers(1, 4),
    multiple=st.integers(1, 3),
)
def test_a_plan_holds_every_sample_once_within_the_limits_and_equally_many_on_every_rank(
    lengths: list[int], budget: int | None, size: int, dp_size: int, multiple: int
) -> None:
    limits = BatchingLimits(max_tokens=budget, micro_batch_size=size)
    plan = plan_microbatches(lengths, limits, dp_size=dp_size, count_multiple=multiple)
    cells = [samples for rank in plan.ranks for samples in rank]
    assert sorted(i for samples in cells for i in samples) == list(range(len(lengths)))
    assert {len(rank) for rank in plan.ranks} == {plan.num_microbatches}
    assert len(plan.ranks) == dp_size and plan.num_microbatches % multiple == 0
    for samples in cells:
        if budget is None:
            assert len(samples) <= size
        elif len(samples) > 1:
            assert sum(lengths[i] for i in samples) <= budget
    too_long = [i for i, length in enumerate(lengths) if budget is not None and length > budget]
    assert list(plan.oversize) == too_long
    assert all((i,) in cells for i in too_long)
    # The same on every rank without talking: planning has no randomness.
    assert plan == plan_microbatches(lengths, limits, dp_size=dp_size, count_multiple=multiple)


def test_the_fewest_microbatches_that_fit_are_used() -> None:
    # 6 + 4 = 5 + 5 = 10: two microbatches of exactly the budget.
    plan = plan_microbatches([5, 6, 4, 5], BatchingLimits(max_tokens=10))
    assert sorted(tokens_of(plan, [5, 6, 4, 5])[0]) == [10, 10]


def test_load_is_balanced_over_ranks_by_cost_and_largest_first() -> None:
    # One sample of 100 tokens weighs as much as the four of 25 together (linear cost).
    lengths = [25, 25, 100, 25, 25]
    plan = plan_microbatches(lengths, BatchingLimits(max_tokens=100), dp_size=2, hidden_size=10**9)
    assert sorted(sum(tokens) for tokens in tokens_of(plan, lengths)) == [100, 100]
    lengths = [9, 3, 7, 5, 8, 2]
    by_one = tokens_of(plan_microbatches(lengths, BatchingLimits(), dp_size=2), lengths)
    assert all(tokens == sorted(tokens, reverse=True) for tokens in by_one)
    # 9+5+3 and 8+7+2: longest first to the lighter rank.
    assert sorted(map(sum, by_one)) == [17, 17]


def test_cost_grows_with_the_square_of_length_where_attention_dominates() -> None:
    # length * (1 + length / (6 * hidden)): 60 * (1 + 60 / 60) = 120 with hidden size 10.
    assert sample_cost(60, hidden_size=10) == pytest.approx(120.0)
    assert sample_cost(60, hidden_size=10**9) == pytest.approx(60.0)


def test_ranks_without_samples_get_padding_microbatches() -> None:
    batch = uneven_batch(3)
    plan = plan_microbatches(batch.columns["total_lengths"], BatchingLimits(), dp_size=4)
    # 3 samples on 4 ranks, one each: 1 of 4 is padding.
    assert plan.num_microbatches == 1 and plan.padding_share() == 0.25
    built = [cut_share(batch, plan, rank, weight=1.0).microbatches()[0] for rank in range(4)]
    assert [microbatch.is_padding for microbatch in built].count(True) == 1
    for microbatch in built:
        assert microbatch.batch.columns.keys() == batch.columns.keys()


def test_virtual_pipelining_gets_whole_rounds() -> None:
    # 5 microbatches on one rank become 6 with rounds of 2, one of them padding.
    plan = plan_microbatches([4] * 5, BatchingLimits(), count_multiple=2)
    assert plan.num_microbatches == 6 and plan.padding_share() == pytest.approx(1 / 6)


def test_a_real_sample_that_is_fully_masked_is_no_padding() -> None:
    batch = uneven_batch(2)
    masked = batch.select([1])
    assert int(masked.columns["loss_masks"][0].sum()) == 0
    plan = plan_microbatches(masked.columns["total_lengths"], BatchingLimits())
    (microbatch,) = cut_share(masked, plan, 0, weight=1.0).microbatches()
    assert not microbatch.is_padding and plan.padding_share() == 0
    assert isinstance(microbatch.batch, RolloutBatch) and len(microbatch.batch) == 1


def test_a_sample_longer_than_the_model_is_an_error_that_names_it() -> None:
    limits = BatchingLimits(max_tokens=5, max_sample_tokens=10)
    plan_microbatches([10, 3], limits)
    with pytest.raises(BatchError, match=r"sample 1 has 11 tokens, the model takes 10"):
        plan_microbatches([10, 11], limits)


def test_a_batch_without_samples_is_an_error() -> None:
    with pytest.raises(BatchError, match="no samples"):
        plan_microbatches([], BatchingLimits())


@pytest.mark.parametrize("limits", [{"max_tokens": 0}, {"micro_batch_size": 0}])
def test_limits_below_one_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        BatchingLimits(**limits)


@pytest.mark.parametrize("limits", [{"max_tokens": 16384}, {"micro_batch_size": 4}])
def test_very_many_samples_are_planned_in_rounds_as_evenly_and_as_tightly(
    limits: dict[str, int],
) -> None:
    lengths = np.random.default_rng(0).integers(50, 4000, 40_000)
    lengths[7] = 20_000
    plan = plan_microbatches(lengths, BatchingLimits(**limits), dp_size=3, count_multiple=2)
    cells = [np.array(cell, np.int64) for rank in plan.ranks for cell in rank]
    assert np.array_equal(np.sort(np.concatenate(cells)), np.arange(40_000))
    assert plan.num_microbatches % 2 == 0
    if "max_tokens" in limits:
        assert plan.oversize == (7,)
        assert max(lengths[cell].sum() for cell in cells if 7 not in cell) <= 16384
        fewest = lengths.sum() / 16384 / 3
    else:
        assert max(map(len, cells)) <= 4
        fewest = 40_000 / 4 / 3
    assert plan.num_microbatches < 1.03 * fewest + 2
    loads = [sum(sample_cost(lengths[list(cell)]).sum() for cell in rank) for rank in plan.ranks]
    assert max(loads) < 1.001 * min(loads)


def test_no_number_of_microbatches_below_the_first_that_is_tried_could_hold_the_samples() -> None:
    # Three above half the budget, one of which leaves room for the 2: 3. By tokens alone: 2.
    assert (
        _Samples(np.array([6, 6, 8, 2]), np.ones(4), BatchingLimits(10)).fewest_bins(np.arange(4))
        == 3
    )
    # The 9 shares with nothing; the others hold 15 tokens: 1 + 2.
    assert (
        _Samples(np.array([9, 5, 5, 5]), np.ones(4), BatchingLimits(10)).fewest_bins(np.arange(4))
        == 3
    )
