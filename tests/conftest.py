"""Settings of the whole suite, and the rank pool and the Ray cluster that all of it shares."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, settings

try:
    from xdist.scheduler import LoadScopeScheduling
except ImportError:  # environments of other suites have no xdist
    LoadScopeScheduling = object

if TYPE_CHECKING:
    from tests.parallel.rank_pool import RankPool

# Before Ray is imported: its nodes then listen on loopback only.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

# The cases are tiny: threads would cost more than they bring, and several suites may share a machine.
torch.set_num_threads(1)
settings.register_profile(
    "suite",
    deadline=None,
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("suite")


#: Directories whose tests share what is expensive to start: ranks, and a Ray cluster.
_OF_ONE_PROCESS = {"tests/parallel": "ranks", "tests/ray": "ray"}


class _Schedule(LoadScopeScheduling):
    """With `-n`, ranks and Ray belong to one process each, and every other test to whichever is free."""

    def _split_scope(self, nodeid: str) -> str:
        return _OF_ONE_PROCESS.get(nodeid.rpartition("/test_")[0], nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _Schedule(config, log)


@pytest.fixture
def jumping_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock is set forth and back by hours whenever somebody reads it.

    A deadline by this clock passes at once, or never: modules that test deadlines use this fixture.
    """
    hours, read = itertools.cycle((0.0, 6.0, -6.0)), time.time
    monkeypatch.setattr(time, "time", lambda: read() + 3600 * next(hours))
    monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """One set of warm worker processes for the whole session."""
    from tests.parallel.rank_pool import RankPool

    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def run_ranks(rank_pool: RankPool) -> Callable[..., list[Any]]:
    """`run_ranks(fn, world_size, *args, timeout=..., **parallel_sizes)` -> results in rank order."""
    return rank_pool.run_ranks


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[str]:
    """The address of a cluster on loopback: 3 CPU slots on the first node, 2 on the second."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    # As in a Ray that a job starts: at Ray's own 15 the workers starve on a busy machine.
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_worker_niceness", "0")
        cluster.add_node(num_cpus=3, include_dashboard=False)
        cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
    yield cluster.address
    cluster.shutdown()
