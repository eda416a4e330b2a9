"""Fixtures for tests on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.parallel.rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """One set of warm worker processes for the whole session."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def run_ranks(rank_pool: RankPool) -> Callable[..., list[Any]]:
    """`run_ranks(fn, world_size, *args, timeout=..., **parallel_sizes)` -> results in rank order."""
    return rank_pool.run_ranks
