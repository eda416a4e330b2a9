"""Which reservations a job makes, and what it says about a cluster that cannot hold them."""

from __future__ import annotations

import pytest

from plugin.config import JobConfig
from plugin.errors import ClusterError
from plugin.launch.placement import _numeric, check_cluster, plan_resources

SIZES = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


def test_ranks_are_packed_per_node_and_engines_have_their_own_slots() -> None:
    plan = plan_resources(JobConfig(num_nodes=2, **SIZES), use_gpus=False)
    assert plan.trainer_nodes == [{"CPU": 2.0}, {"CPU": 2.0}]
    assert plan.engines == [{"CPU": 1.0}]
    assert plan.cpu_slots == 5


def test_each_rank_and_engine_has_a_gpu_where_there_are_gpus() -> None:
    plan = plan_resources(JobConfig(num_rollout_engines=2, cpus_per_rank=3, **SIZES), use_gpus=True)
    assert plan.trainer_nodes == [{"CPU": 12.0, "GPU": 4.0}]
    assert plan.engines == [{"CPU": 3.0, "GPU": 1.0}] * 2


def test_a_colocated_engine_shares_a_gpu_with_exactly_one_rank() -> None:
    plan = plan_resources(JobConfig(colocate=True, **SIZES), use_gpus=True)
    assert plan.engines == []
    assert plan.rank["GPU"] + plan.engine["GPU"] <= 1 < 2 * plan.rank["GPU"]


def test_a_cluster_that_fits_is_accepted() -> None:
    plan = plan_resources(JobConfig(num_nodes=2, **SIZES), use_gpus=False)
    check_cluster(plan, [{"CPU": 2.0}, {"CPU": 3.0}])


@pytest.mark.parametrize(
    "nodes",
    [
        [{"CPU": 8.0}],  # enough slots, but not two nodes
        [{"CPU": 2.0}, {"CPU": 2.0}],  # no slot left for the engine
        [{"CPU": 1.0}, {"CPU": 8.0}],  # one node too small
    ],
)
def test_a_too_small_cluster_is_told_what_it_has_and_what_is_needed(
    nodes: list[dict[str, float]],
) -> None:
    plan = plan_resources(JobConfig(num_nodes=2, **SIZES), use_gpus=False)
    with pytest.raises(ClusterError) as caught:
        check_cluster(plan, nodes)
    message = str(caught.value)
    assert f"has {len(nodes)} node" in message
    assert f"{nodes[0]['CPU']:g} CPU" in message
    assert "needs 2 x (2 CPU) on nodes of their own and 1 x (1 CPU) for engines" in message
    assert "--num-nodes" in message


def test_addresses_sort_as_numbers() -> None:
    assert _numeric("10.0.0.9") < _numeric("10.0.0.10")
