"""Sums and maxima that do not depend on how a batch was cut."""

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from plugin.ppo_utils.sufficient_statistics import StatisticsTable


def record(*parts: tuple[torch.Tensor, torch.Tensor]) -> StatisticsTable:
    table = StatisticsTable()
    for values, over in parts:
        table.add_mean("ratio", values, over)
        table.add_extremes("ratio", values, over)
    return table


def test_a_mean_is_one_sum_over_one_count_not_a_mean_of_means() -> None:
    # microbatches of 1 and 3 tokens: (10 + 1 + 2 + 3) / 4 = 4; the mean of means would be (10 + 2) / 2 = 6
    one, three = torch.ones(1, dtype=torch.bool), torch.ones(3, dtype=torch.bool)
    table = record((torch.tensor([10.0]), one), (torch.tensor([1.0, 2.0, 3.0]), three))
    means = table.means()
    assert means == {"ratio": 4.0, "ratio_max": 10.0, "ratio_min": 1.0}


def test_masked_garbage_is_in_no_cell() -> None:
    over = torch.tensor([True, False, False])
    table = record((torch.tensor([2.0, math.nan, 1e30]), over))
    assert table.means() == {"ratio": 2.0, "ratio_max": 2.0, "ratio_min": 2.0}


@given(st.lists(st.integers(0, 30), max_size=4), st.integers(0, 2**31))
def test_any_cut_gives_the_same_metrics(cuts: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(30, generator=generator)
    over = torch.rand(30, generator=generator) > 0.3
    bounds = [0, *sorted(cuts), 30]
    pieces = [(values[a:b], over[a:b]) for a, b in itertools.pairwise(bounds)]
    whole, parts = record((values, over)).means(), record(*pieces).means()
    assert whole["ratio_max"] == parts["ratio_max"] and whole["ratio_min"] == parts["ratio_min"]
    assert math.isclose(whole["ratio"], parts["ratio"], rel_tol=1e-12, abs_tol=1e-12)


def test_merging_tables_equals_recording_in_one() -> None:
    over = torch.ones(2, dtype=torch.bool)
    first, second = torch.tensor([1.0, 5.0]), torch.tensor([-2.0, 0.5])
    table = record((first, over))
    table.merge(record((second, over)))
    assert table.means() == record((first, over), (second, over)).means()


def test_packing_and_reducing_on_one_rank_keeps_every_cell() -> None:
    table = record((torch.tensor([1.0, 5.0]), torch.ones(2, dtype=torch.bool)))
    table.add("histogram", torch.tensor([1.0, 2.0, 3.0]))
    reduced = table.reduced(None)
    assert reduced.means() == table.means()
    assert reduced.sums["histogram"].tolist() == [1.0, 2.0, 3.0]
    assert table.packed().numel() == 2 + 3 + 2


def test_rows_of_several_ranks_are_summed_and_maximized() -> None:
    over = torch.ones(1, dtype=torch.bool)
    ranks = [record((torch.tensor([value]), over)) for value in (3.0, -1.0, 4.0)]
    combined = ranks[0]._from_rows(torch.stack([rank.packed() for rank in ranks]))
    assert combined.means() == {"ratio": 2.0, "ratio_max": 4.0, "ratio_min": -1.0}


def test_digests_agree_exactly_when_cells_agree() -> None:
    first, second, other = StatisticsTable(), StatisticsTable(), StatisticsTable()
    first.add("a", 1.0), first.add("b", torch.zeros(3))
    second.add("b", torch.ones(3)), second.add("a", 9.0)  # other order, other values
    other.add("a", 1.0), other.add("b", torch.zeros(4))  # other shape
    assert first.digest() == second.digest()
    assert first.digest() != other.digest()


def test_an_empty_mean_is_zero_and_sums_are_float64() -> None:
    table = record((torch.zeros(0), torch.zeros(0, dtype=torch.bool)))
    assert table.means()["ratio"] == 0.0
    # 2**24 ones and another one: float32 would lose the last
    table = StatisticsTable()
    table.add_mean("x", torch.tensor([2.0**24, 1.0]), torch.ones(2, dtype=torch.bool))
    assert table.sums["x:sum"].item() == 2.0**24 + 1


def test_cells_with_a_shape_are_left_out_of_the_means() -> None:
    table = StatisticsTable()
    table.add("histogram", torch.ones(5))
    table.maximum("table:extremes", torch.ones(2, 3))
    assert table.means() == {}
