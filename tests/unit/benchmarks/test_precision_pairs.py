"""Mismatch by dtypes: that docs and data agree, that no pair is missing, and the numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.marked_pages import marked
from benchmarks.precision import summary
from benchmarks.precision.pairs import DTYPES, statistics
from plugin.ragged import Ragged


def test_the_table_in_the_docs_is_that_of_the_data() -> None:
    shown = marked(summary.PAGE, summary.MARK)
    assert shown == summary.table(summary.read()), "python -m benchmarks.precision --summary"
    assert summary.FIGURE.exists()


def test_every_pair_is_measured() -> None:
    pairs = [(row["trainer"], row["engine"]) for row in summary.read()["pairs"]]
    assert pairs == [(trainer, engine) for trainer in DTYPES for engine in DTYPES]


def test_statistics_by_hand() -> None:
    # Two sequences with log-ratios 0, log 2 and log 2, log 2.
    rollout = Ragged(torch.tensor([-1.0, -2.0, -3.0, -2.0]), torch.tensor([2, 2]).numpy())
    shift = torch.tensor([0.0, math.log(2), math.log(2), math.log(2)])
    found = statistics(Ragged(rollout.values + shift, rollout.lengths), rollout)
    # r - 1 - log r: 0 and 1 - log 2 three times, over 4 tokens; by sequence (1 - log 2) / 2 and 1 - log 2.
    each = 1 - math.log(2)
    assert found["k3"] == pytest.approx(0.75 * each, rel=1e-6)
    # Of a and 2 a: deviation a / sqrt(2), divided by sqrt(2).
    assert found["k3_error"] == pytest.approx(each / 4, rel=1e-6)
    assert found["abs_log_ratio"] == pytest.approx(0.75 * math.log(2), rel=1e-6)
    # (1 + 2 + 2 + 2)^2 / (1 + 4 + 4 + 4) / 4
    assert found["ess_share"] == pytest.approx(49 / 13 / 4, rel=1e-6)
    # Sequences weigh 2 and 4: (6^2 / 20) / 2; their log-ratios are log 2 and 2 log 2.
    assert found["sequence_ess_share"] == pytest.approx(0.9, rel=1e-6)
    assert found["sequence_abs_log_ratio"] == pytest.approx(1.5 * math.log(2), rel=1e-6)
    assert found["surprise"] == 2.0 and found["tokens"] == 4.0
