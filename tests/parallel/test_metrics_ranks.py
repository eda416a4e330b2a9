"""Mismatch metrics of four ranks, each with its share of the tokens, equal those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.ppo_utils import sufficient_statistics
from plugin.ppo_utils.mismatch_metrics import record_mismatch, summarize
from plugin.ppo_utils.sufficient_statistics import StatisticsTable
from tests.unit.ppo_utils.test_mismatch_metrics import tokens

#: Uneven on purpose; the third rank has no token at all.
SHARES = ((0, 57), (57, 300), (300, 300), (300, 400))


def rank_device() -> torch.device:
    """This rank's GPU, if it has one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def share_of(groups: ParallelGroups) -> dict[str, torch.Tensor]:
    start, end = SHARES[groups.dp_rank]
    return {name: value[start:end].to(rank_device()) for name, value in tokens().items()}


def share_metrics(groups: ParallelGroups, gather_limit: int) -> dict[str, float]:
    sufficient_statistics.GATHER_LIMIT = gather_limit
    table = StatisticsTable(rank_device())
    record_mismatch(table, **share_of(groups))
    try:
        return summarize(table.reduced(groups.dp_group))
    finally:
        sufficient_statistics.GATHER_LIMIT = 64


def digests(groups: ParallelGroups) -> int:
    table = StatisticsTable(rank_device())
    values = share_of(groups)
    values["mask"] = values["mask"] & (groups.dp_rank != 1)
    record_mismatch(table, **values)
    return table.digest()


@pytest.mark.parametrize("gather_limit", [64, 1])
def test_four_ranks_report_what_one_process_reports(
    run_ranks: Callable[..., list[Any]], gather_limit: int
) -> None:
    table = StatisticsTable()
    record_mismatch(table, **tokens())
    alone = summarize(table)
    for metrics in run_ranks(share_metrics, 4, gather_limit):
        assert metrics.keys() == alone.keys()
        for name, value in alone.items():
            assert metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name


def test_ranks_without_an_unmasked_token_hold_the_same_cells(
    run_ranks: Callable[..., list[Any]],
) -> None:
    assert len(set(run_ranks(digests, 4))) == 1


def test_the_test_data_has_tokens_of_every_kind() -> None:
    values = tokens()
    assert bool(values["mask"].any()) and not bool(values["mask"].all())
    assert not torch.equal(values["train_log_probs"], values["rollout_log_probs"])
