"""Mismatch of the real model: that docs and data agree, and the numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.marked_pages import marked
from benchmarks.real_mismatch import summary
from benchmarks.real_mismatch.engines import SETTINGS, TRUNCATED, Setting, held
from benchmarks.real_mismatch.measure import TRAINERS, in_company, statistics
from plugin.batch_types import RolloutSample


def sample(tokens: list[int], log_probs: list[float]) -> RolloutSample:
    """A prompt of one token, and a response."""
    ids = torch.tensor([0, *tokens])
    return RolloutSample(
        ids, len(tokens), torch.ones(len(tokens)), rollout_log_probs=torch.tensor(log_probs)
    )


def test_the_tables_in_the_docs_are_those_of_the_data() -> None:
    shown = marked(summary.PAGE, summary.MARK)
    assert shown == summary.tables(summary.read()), "python -m benchmarks.real_mismatch --summary"
    assert summary.FIGURE.exists()


def test_every_engine_is_scored_by_every_trainer() -> None:
    pairs = {(row["engine"], row["trainer"]) for row in summary.read()["rows"]}
    assert pairs >= {(s.name, dtype) for s in (*SETTINGS, TRUNCATED) for dtype in TRAINERS}


def test_statistics_by_hand() -> None:
    # Log-ratios 0 and log 3; the second token has rank 7 and 1.5 nats.
    shape = {
        "position": torch.tensor([0, 1]),
        "entropy": torch.tensor([0.0, 1.5]),
        "rank": torch.tensor([1, 7]),
    }
    row = statistics(
        [sample([4, 5], [-1.0, -3.0])], [torch.tensor([-1.0, -3.0 + math.log(3)])], [shape]
    )
    k3 = (3 - 1 - math.log(3)) / 2
    assert row["k3"] == pytest.approx(k3) and row["abs_log_ratio"] == pytest.approx(math.log(3) / 2)
    assert row["largest_ratio"] == pytest.approx(3) and row["ess_share"] == pytest.approx(16 / 20)
    assert row["outside_20_percent"] == row["outside_factor_2"] == 0.5
    by_rank = [(one["from"], one["tokens"], one["k3"]) for one in row["by_rank"]]
    assert by_rank == [(1, 1, 0.0), (6, 1, pytest.approx(2 * k3))]
    assert [one["from"] for one in row["by_entropy"]] == [0.0, 1.0]


def test_company_is_compared_up_to_the_first_token_that_differs() -> None:
    one, other = sample([4, 5, 6], [-1.0, -2.0, -3.0]), sample([4, 7, 6], [-1.5, -9.0, -9.0])
    found = in_company([one, one], [one, other])
    assert found["same_tokens"] == 1 and found["compared_tokens"] == 4
    assert found["abs_difference"] == pytest.approx(0.5 / 4)
    assert found["bitwise_equal"] == 0.75


def test_rounded_weights_by_hand() -> None:
    # A block of 32 whose largest number is -8 steps of 0.5; 0.6 is rounded to one step, 5 is cut at 7 of them.
    block = torch.zeros(1, 32)
    block[0, :3] = torch.tensor([-4.0, 0.6, 3.9])
    weights = {"layer": block, "embed_tokens": block, "norm": block[0]}
    four = held(weights, Setting("transformers", "float32", "int4"))
    assert four["layer"][0, :4].tolist() == [-4.0, 0.5, 3.5, 0.0]
    eight = held(weights, Setting("transformers", "float32", "int8"))
    assert eight["layer"][0, :3].tolist() == pytest.approx([-4.0, 19 * 4 / 127, 124 * 4 / 127])
    assert four["embed_tokens"] is block and eight["norm"] is weights["norm"]
