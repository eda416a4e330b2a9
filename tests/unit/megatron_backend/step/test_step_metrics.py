"""Metrics of a step from its table of sums."""

from __future__ import annotations

import pytest
import torch

from plugin.megatron_backend.step.step_metrics import step_metrics
from plugin.ppo_utils.sufficient_statistics import StatisticsTable


def test_a_mean_whose_weights_sum_to_less_than_one_is_still_divided_by_them() -> None:
    # Samples divided by the token count of a longer rollout: weights 0.3 + 0.2, weighted loss 0.2: 0.2 / 0.5 = 0.4.
    table = StatisticsTable()
    table.add("loss:sum", 0.2)
    table.add("loss:count", torch.tensor([0.3, 0.2]).sum())
    table.add("num_tokens", 5)
    assert step_metrics(table)["loss"] == pytest.approx(0.4)
    assert step_metrics(table)["num_tokens"] == 5.0


def test_a_mean_over_nothing_is_zero() -> None:
    table = StatisticsTable()
    table.add_mean("tis", torch.tensor([torch.nan]), torch.tensor([False]))
    assert step_metrics(table) == {"tis": 0.0, "num_tokens": 0.0}
