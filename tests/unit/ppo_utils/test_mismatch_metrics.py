"""Mismatch metrics: hand-computed values, slices, and independence from masks and cuts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from plugin.ppo_utils.mismatch_metrics import (
    HISTOGRAM_BINS,
    SLICES,
    histogram_bin,
    histogram_percentile,
    record_mismatch,
    summarize,
)
from plugin.ppo_utils.sufficient_statistics import StatisticsTable

LOG2 = math.log(2.0)


def table_of(**values: Tensor | None) -> StatisticsTable:
    table = StatisticsTable()
    record_mismatch(table, **values)  # type: ignore[arg-type]
    return table


def tokens(count: int = 400, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rollout = -4 * torch.rand(count, generator=generator) - 0.01
    return {
        "mask": torch.rand(count, generator=generator) > 0.25,
        "rollout_log_probs": rollout,
        "train_log_probs": rollout + 0.1 * torch.randn(count, generator=generator),
        "cur_log_probs": rollout + 0.1 * torch.randn(count, generator=generator),
        "position": torch.arange(count) % 70,
        "staleness": torch.arange(count) % 6,
        "advantages": torch.randn(count, generator=generator),
        "kept": torch.rand(count, generator=generator) > 0.1,
    }


def test_four_tokens_give_the_values_computed_by_hand() -> None:
    # train - rollout = log 2, -log 2, 0, 0: ratios 2, 1/2, 1, 1; sum 4.5, squares 4 + 0.25 + 1 + 1 = 6.25.
    rollout = torch.tensor([-2.0, -1.0, -1.0, -3.0])
    train = rollout + torch.tensor([LOG2, -LOG2, 0.0, 0.0])
    metrics = summarize(
        table_of(
            mask=torch.ones(4, dtype=torch.bool),
            train_log_probs=train,
            rollout_log_probs=rollout,
            position=torch.arange(4),
        )
    )
    expected = {
        "tokens": 4,
        "ratio_mean": 4.5 / 4,
        "ratio_max": 2,
        "ratio_min": 0.5,
        "ess": 4.5**2 / 6.25,
        "ess_share": 4.5**2 / 6.25 / 4,
        "chi2": 6.25 / 4 - 1,
        # d = rollout - train = -log 2, log 2, 0, 0
        "k1": 0,
        "k2": LOG2**2 / 4,
        # exp(-d) - 1 + d: 2 - 1 - log 2 and 1/2 - 1 + log 2 add up to 1/2
        "k3": 0.5 / 4,
        "train_perplexity": math.exp(7 / 4),
        "rollout_perplexity": math.exp(7 / 4),
        "kept_share": 1,
    }
    for name, value in expected.items():
        assert metrics[f"mismatch/{name}"] == pytest.approx(value, abs=1e-6), name


def test_clipping_and_masking_are_counted_by_side() -> None:
    # ratios 4, 1/4, 1, 2, 1/2 with weights clipped to [1/3, 3]; the last two are dropped.
    rollout = torch.full((5,), -3.0)
    ratio = torch.tensor([4.0, 0.25, 1.0, 2.0, 0.5])
    metrics = summarize(
        table_of(
            mask=torch.ones(5, dtype=torch.bool),
            train_log_probs=rollout + ratio.log(),
            rollout_log_probs=rollout,
            position=torch.zeros(5, dtype=torch.int64),
            weights=ratio.clamp(1 / 3, 3),
            kept=torch.tensor([True, True, True, False, False]),
            advantages=torch.tensor([1.0, -1.0, 1.0, 2.0, -3.0]),
        )
    )
    assert metrics["mismatch/clipped_high_share"] == pytest.approx(1 / 5)
    assert metrics["mismatch/clipped_low_share"] == pytest.approx(1 / 5)
    assert metrics["mismatch/masked_high_share"] == pytest.approx(1 / 5)
    assert metrics["mismatch/masked_low_share"] == pytest.approx(1 / 5)
    assert metrics["mismatch/kept_share"] == pytest.approx(3 / 5)
    assert metrics["mismatch/weight_max"] == pytest.approx(3)
    assert metrics["mismatch/weight_min"] == 0
    assert metrics["mismatch/weight_mean"] == pytest.approx((3 + 1 / 3 + 1) / 5)
    assert metrics["mismatch/positive_advantage_removed"] == pytest.approx(2 / 4)
    assert metrics["mismatch/negative_advantage_removed"] == pytest.approx(3 / 4)


def test_slices_by_position_staleness_and_probability_hold_their_own_tokens() -> None:
    # Positions 0, 1, 3, 100; staleness 0, 0, 4, 20; probabilities 0.5, 0.005, 0.95, 1e-5; differences 0.1 .. 0.4.
    rollout = torch.tensor([0.5, 0.005, 0.95, 1e-5]).log()
    difference = torch.tensor([0.1, 0.2, 0.3, 0.4])
    metrics = summarize(
        table_of(
            mask=torch.ones(4, dtype=torch.bool),
            train_log_probs=rollout + difference,
            rollout_log_probs=rollout,
            position=torch.tensor([0, 1, 3, 100]),
            staleness=torch.tensor([0, 0, 4, 20]),
        )
    )
    assert metrics["mismatch/by_position/64-127/k2"] == pytest.approx(0.08, rel=1e-4)
    assert metrics["mismatch/by_position/2-3/k2"] == pytest.approx(0.045, rel=1e-4)
    assert metrics["mismatch/by_staleness/0/k2"] == pytest.approx((0.005 + 0.02) / 2, rel=1e-4)
    assert metrics["mismatch/by_staleness/3-4/tokens"] == 1
    assert metrics["mismatch/by_staleness/9+/k2"] == pytest.approx(0.08, rel=1e-4)
    assert metrics["mismatch/by_rollout_prob/0.001-0.01/k2"] == pytest.approx(0.02, rel=1e-4)
    assert metrics["mismatch/by_rollout_prob/0-0.0001/ratio_max"] == pytest.approx(math.exp(0.4))
    assert "mismatch/by_staleness/1/k2" not in metrics


def test_unknown_staleness_is_in_no_bin() -> None:
    values = {**tokens(), "staleness": None}
    metrics = summarize(table_of(**values))
    assert not [name for name in metrics if "by_staleness" in name]


def test_masked_garbage_changes_nothing() -> None:
    values = tokens()
    clean = summarize(table_of(**values))
    for name, garbage in (
        ("rollout_log_probs", float("-inf")),
        ("train_log_probs", float("nan")),
        ("cur_log_probs", 1e30),
        ("advantages", float("nan")),
    ):
        values[name] = torch.where(values["mask"], values[name], garbage)
    assert summarize(table_of(**values)) == clean


def test_the_metrics_do_not_depend_on_how_the_batch_was_cut() -> None:
    values = tokens()
    whole = summarize(table_of(**values))
    cut = StatisticsTable()
    for start, end in ((0, 1), (1, 130), (130, 130), (130, 400)):
        record_mismatch(cut, **{name: value[start:end] for name, value in values.items()})
    parts = summarize(cut)
    assert parts.keys() == whole.keys()
    for name, value in whole.items():
        assert parts[name] == pytest.approx(value, rel=1e-12, abs=1e-15), name


def test_percentiles_are_close_to_the_exact_ones() -> None:
    values = tokens(20000)
    metrics = summarize(table_of(**values))
    exact = (values["train_log_probs"] - values["rollout_log_probs"])[values["mask"]]
    for percent in (1, 25, 50, 99):
        quantile = float(torch.quantile(exact, percent / 100))
        measured = math.log(metrics[f"mismatch/ratio_p{percent:02d}"])
        assert measured == pytest.approx(quantile, abs=0.004, rel=0.05)


def test_the_histogram_covers_every_log_ratio() -> None:
    values = torch.tensor([-1e9, -20.0, -1e-9, 0.0, 1e-9, 20.0, 1e9], dtype=torch.float64)
    bins = histogram_bin(values)
    assert int(bins.min()) == 0 and int(bins.max()) == HISTOGRAM_BINS - 1
    assert len(set(bins[2:5].tolist())) == 1


def test_the_median_of_one_bin_is_inside_it() -> None:
    counts = torch.zeros(HISTOGRAM_BINS, dtype=torch.float64)
    place = int(histogram_bin(torch.tensor([0.7], dtype=torch.float64)))
    counts[place] = 5
    assert histogram_percentile(counts, 50) == pytest.approx(0.7, rel=0.06)


def test_the_current_policy_is_compared_with_the_rollout_policy_too() -> None:
    values = tokens()
    mask = values["mask"]
    metrics = summarize(table_of(**values))
    difference = (values["cur_log_probs"] - values["rollout_log_probs"])[mask].double()
    assert metrics["mismatch/cur/ratio_mean"] == pytest.approx(float(difference.exp().mean()))
    assert metrics["mismatch/cur/ratio_max"] == pytest.approx(float(difference.exp().max()))


def test_a_step_without_tokens_has_no_metrics() -> None:
    values = {**tokens(), "mask": torch.zeros(400, dtype=torch.bool)}
    assert summarize(table_of(**values)) == {}
    assert summarize(StatisticsTable()) == {}


def test_every_token_is_in_exactly_one_bin_of_each_dimension() -> None:
    table = table_of(**tokens())
    counts = table.sums["mismatch:sums"][:, 0]
    for dimension in ("by_position", "by_staleness", "by_rollout_prob"):
        rows = [i for i, label in enumerate(SLICES) if label.startswith(dimension)]
        assert float(counts[rows].sum()) == float(counts[0])


def test_divergences_of_the_whole_batch_by_hand() -> None:
    """Ratios 2 and 0.5, equally often sampled."""
    table = StatisticsTable()
    record_mismatch(
        table,
        mask=torch.tensor([True, True, False]),
        train_log_probs=torch.tensor([0.5, 0.25, torch.nan]).log(),
        rollout_log_probs=torch.tensor([0.25, 0.5, -torch.inf]).log(),
        position=torch.tensor([0, 1, 2]),
    )
    found = summarize(table)
    assert found["mismatch/multiplicative_error"] == pytest.approx(2.0)
    # r log r - r + 1: 2 log 2 - 1 = 0.386294; -0.5 log 2 + 0.5 = 0.153426
    assert found["mismatch/reverse_k3"] == pytest.approx((0.386294 + 0.153426) / 2, abs=1e-5)
    # r = 2: (log(2/3) + 2 log(4/3)) / 2 = 0.084949; r = 0.5: (log(4/3) + 0.5 log(2/3)) / 2 = 0.042475
    assert found["mismatch/js"] == pytest.approx((0.084949 + 0.042475) / 2, abs=1e-5)
    assert not any(name.endswith("/js") for name in found if "by_" in name)


def test_the_estimates_have_the_divergences_of_two_distributions_as_expectation() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    table, ids = StatisticsTable(), torch.tensor([0, 0, 1, 1, 2, 2, 2, 2, 2, 2])  # 10 q of each
    record_mismatch(
        table,
        mask=torch.ones(10, dtype=torch.bool),
        train_log_probs=p.log()[ids],
        rollout_log_probs=q.log()[ids],
        position=torch.arange(10),
    )
    found, mixture = summarize(table), (p + q) / 2
    js = ((p * (p / mixture).log()).sum() + (q * (q / mixture).log()).sum()) / 2
    assert found["mismatch/js"] == pytest.approx(float(js))
    assert found["mismatch/reverse_k3"] == pytest.approx(float((p * (p / q).log()).sum()))
