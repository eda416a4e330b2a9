"""A two-node Ray cluster on loopback for the whole session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before Ray is imported: its nodes then listen on loopback only.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[str]:
    """The address of a cluster with 3 CPU slots on the first node and 2 on the second."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    cluster.add_node(num_cpus=3, include_dashboard=False)
    cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    yield cluster.address
    cluster.shutdown()
