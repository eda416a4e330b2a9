"""An engine larger than every node: its bundles are on several nodes, and a worker in each has a GPU of its own.

vLLM's Ray executor refuses machines without GPUs, so a stand-in puts workers into the bundles the way that executor does. The GPUs
are numbers that Ray was told.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from plugin.cluster import engine_pool
from plugin.cluster.engine_pool import EnginePool
from plugin.cluster.placement import plan_on_cluster, reserve
from plugin.cluster.remote_calls import wait_for_all
from plugin.config import JobConfig
from plugin.observe.console import Console
from tests.ray.placed_workers import StandIn

pytestmark = pytest.mark.slow


@pytest.fixture
def two_gpu_nodes() -> Iterator[None]:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    cluster.add_node(num_cpus=4, num_gpus=2, include_dashboard=False)
    cluster.add_node(num_cpus=4, num_gpus=3)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address)
    yield
    ray.shutdown()
    cluster.shutdown()


def test_the_workers_of_an_engine_that_spans_two_nodes_have_a_gpu_each(
    two_gpu_nodes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_pool, "EngineActor", StandIn)
    config = JobConfig(
        rollout_engine="vllm", rollout_num_gpus_per_engine=4, address="auto", num_gpus_per_node=1
    )
    plan = plan_on_cluster(config)
    assert plan.bundles_per_engine == 4 and len(plan.engines) == 4
    reservation = reserve(plan, timeout=30)
    try:
        pool = EnginePool(config, {}, plan, reservation, Console())
        [health] = pool.wait_until_ready()
        assert health.name == "engine 0"
        [engine] = pool._engines
        [places] = wait_for_all(
            [engine.actor.call.remote("workers")], ["engine 0"], Console(), timeout=120
        )
        nodes = {node for node, _ in places}
        assert len(nodes) == 2, "four GPUs fit on no node"
        assert len({(node, *map(int, gpus)) for node, gpus in places}) == 4
        assert all(len(gpus) == 1 for _, gpus in places)
        pool.close()
    finally:
        reservation.release()
