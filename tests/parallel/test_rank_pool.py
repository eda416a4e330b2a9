"""The rank pool returns results in order, raises the failing rank's traceback and never hangs."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from plugin.errors import ConfigError
from plugin.megatron_backend.parallel_groups import ParallelGroups
from tests.parallel.rank_pool import RankError


def summed_rank(groups: ParallelGroups, offset: int) -> tuple[int, int]:
    total = torch.tensor(groups.rank + offset)
    dist.all_reduce(total)
    return groups.rank, int(total)


def test_results_come_back_in_rank_order_and_collectives_work(run_ranks: Any) -> None:
    # ranks 0..2 with offset 10: 10 + 11 + 12 = 33
    assert run_ranks(summed_rank, 3, 10) == [(0, 33), (1, 33), (2, 33)]


def places(groups: ParallelGroups) -> tuple[int, ...]:
    return (
        groups.tp_rank,
        groups.pp_rank,
        groups.dp_rank,
        groups.dp_cp_size,
        int(groups.starts_model(0)),
        int(groups.ends_model(1)),
        groups.num_chunks,
    )


def test_groups_name_the_place_of_every_rank(run_ranks: Any) -> None:
    sizes = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    }
    # Megatron counts tensor parallel ranks fastest and pipeline stages slowest.
    assert run_ranks(places, 4, **sizes) == [
        (0, 0, 0, 1, 1, 0, 2),
        (1, 0, 0, 1, 1, 0, 2),
        (0, 1, 0, 1, 0, 1, 2),
        (1, 1, 0, 1, 0, 1, 2),
    ]


def nothing(groups: ParallelGroups) -> None:
    return None


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"tensor_model_parallel_size": 3}, "3 x 1 x 1 = 3"),
        ({"expert_model_parallel_size": 4}, "4 x 1 x 1 = 4"),
        ({"virtual_pipeline_model_parallel_size": 2}, "virtual pipeline size 2"),
    ],
)
def test_sizes_that_do_not_fit_the_ranks_are_refused(
    run_ranks: Any, sizes: dict[str, int], named: str
) -> None:
    with pytest.raises(RankError, match=named) as failure:
        run_ranks(nothing, 2, **sizes)
    assert isinstance(failure.value.__cause__, ConfigError)


def fail_on_rank_one(groups: ParallelGroups) -> None:
    if groups.rank == 1:
        raise ValueError("rank one gives up")
    dist.barrier()


def test_a_failing_rank_is_raised_with_its_traceback_while_others_wait(run_ranks: Any) -> None:
    with pytest.raises(RankError, match="rank one gives up") as failure:
        run_ranks(fail_on_rank_one, 2, timeout=60)
    assert failure.value.rank == 1
    assert "fail_on_rank_one" in str(failure.value)
    assert isinstance(failure.value.__cause__, ValueError)
    assert len(run_ranks(summed_rank, 2, 0)) == 2, "the pool must be usable afterwards"


def sleep_on_rank_zero(groups: ParallelGroups) -> None:
    if groups.rank == 0:
        time.sleep(600)


def test_a_rank_that_hangs_is_killed_and_named_at_the_timeout(run_ranks: Any) -> None:
    with pytest.raises(RankError, match="rank 0 did not finish within 2"):
        run_ranks(sleep_on_rank_zero, 2, timeout=2)
    assert len(run_ranks(summed_rank, 2, 0)) == 2


def die_on_rank_one(groups: ParallelGroups) -> None:
    if groups.rank == 1:
        os._exit(3)


def test_a_rank_that_dies_is_reported_and_replaced(run_ranks: Any) -> None:
    with pytest.raises(RankError, match="died without an answer"):
        run_ranks(die_on_rank_one, 2, timeout=60)
    assert len(run_ranks(summed_rank, 2, 0)) == 2
