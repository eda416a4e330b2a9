"""Which reservations a job makes, and what it says about a cluster that cannot hold them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plugin.cluster.placement import (
    Reservation,
    _numeric,
    check_cluster,
    check_machine,
    on_this_machine,
    plan_on_cluster,
    plan_resources,
    reward_places,
    torch_threads,
)
from plugin.config import JobConfig
from plugin.errors import ClusterError, ConfigError

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


def test_the_client_of_servers_takes_no_gpu() -> None:
    servers = {"rollout_url": "http://127.0.0.1:8000", "rollout_weights_dir": "/shared"}
    config = JobConfig(rollout_engine="http", **servers, **SIZES)
    plan = plan_resources(config, use_gpus=True)
    assert plan.rank["GPU"] == 1 and plan.engine == plan.engines[0] == {"CPU": 1.0}
    check_cluster(plan, [{"CPU": 8.0, "GPU": 4.0}])  # as many as there are ranks


def test_colocated_engines_reserve_nothing_and_have_gpus_of_one_node_each() -> None:
    shared: dict[str, Any] = {"colocate": True, "rollout_engine": "vllm", **SIZES}
    plan = plan_resources(JobConfig(**shared), use_gpus=True)
    assert plan.engines == [] and plan.rank["GPU"] == 1 and plan.engine == {"CPU": 0.0}
    plan_resources(
        JobConfig(num_rollout_engines=2, rollout_num_gpus_per_engine=2, **shared), use_gpus=True
    )
    with pytest.raises(ConfigError, match="3 engines of 2 GPUs on 4 GPUs of the trainer"):
        plan_resources(
            JobConfig(num_rollout_engines=3, rollout_num_gpus_per_engine=2, **shared),
            use_gpus=True,
        )
    with pytest.raises(ConfigError, match="engine 3 and 4 trainer ranks per node"):
        plan_resources(JobConfig(rollout_num_gpus_per_engine=3, **shared), use_gpus=True)
    # Without GPUs there is no memory to fight for.
    plan_resources(JobConfig(num_rollout_engines=9, **shared), use_gpus=False)


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


@pytest.mark.parametrize(
    ("settings", "of_rank", "of_engine"),
    [
        # 8 cores, 2 ranks and 3 engines: 8 // 2 and 8 // 3.
        ({}, 4, 2),
        ({"async_rollouts": True}, 4, 2),
        ({"num_rollout_engines": 9}, 4, 1),
        ({"threads_per_rank": 5}, 5, 5),
    ],
)
def test_ranks_share_all_cores_and_so_do_engines(
    settings: dict[str, Any], of_rank: int, of_engine: int
) -> None:
    base = {"tensor_model_parallel_size": 2, "num_rollout_engines": 3, "use_tis": True}
    config = JobConfig.from_sources({**base, **settings})
    assert torch_threads(config, "rank", hidden_size=256, cores=8) == of_rank
    assert torch_threads(config, "engine", hidden_size=256, cores=8) == of_engine


def test_a_small_model_has_one_thread_unless_told_otherwise() -> None:
    assert torch_threads(JobConfig(), "rank", hidden_size=255, cores=8) == 1
    told = JobConfig.from_sources({"threads_per_rank": 2})
    assert torch_threads(told, "rank", hidden_size=255, cores=8) == 2


def test_an_engine_has_its_gpus_on_one_node() -> None:
    config = JobConfig(rollout_engine="vllm", rollout_num_gpus_per_engine=4, num_rollout_engines=2)
    plan = plan_resources(config, use_gpus=True, gpus_of_a_node=8)
    assert plan.engines == [{"CPU": 4.0, "GPU": 4.0}] * 2
    assert plan.engine == plan.engines[0] and plan.bundles_per_engine == 1
    check_cluster(plan, [{"CPU": 16.0, "GPU": 8.0}, {"CPU": 16.0, "GPU": 4.0}])
    with pytest.raises(ClusterError, match="--rollout-num-gpus-per-engine"):
        # Enough GPUs in all, but no node has four left for the second engine.
        check_cluster(plan, [{"CPU": 16.0, "GPU": 7.0}, {"CPU": 16.0, "GPU": 2.0}])
    on_cpu = plan_resources(config, use_gpus=False)
    assert on_cpu.engines == [{"CPU": 4.0}] * 2 and on_cpu.cpu_slots == 9


def test_an_engine_larger_than_every_node_has_a_bundle_per_gpu() -> None:
    config = JobConfig(rollout_engine="vllm", rollout_num_gpus_per_engine=4, num_rollout_engines=2)
    plan = plan_resources(config, use_gpus=True, gpus_of_a_node=2)
    assert plan.engines == [{"CPU": 1.0, "GPU": 1.0}] * 8
    # The GPUs are taken by vLLM's workers, the actor of the engine has none.
    assert plan.engine == {"CPU": 1.0} and plan.bundles_per_engine == 4
    check_cluster(plan, [{"CPU": 4.0, "GPU": 2.0}] * 5)


@pytest.mark.parametrize(
    ("given", "gpus", "shared"),
    [
        ({}, 1, True),  # a rank and an engine, one GPU
        ({}, 2, False),
        ({}, 0, False),  # slots of a CPU are not scarce
        ({"tensor_model_parallel_size": 8, "rollout_engine": "vllm"}, 8, True),
        ({"colocate": False}, 1, False),
        ({"colocate": True}, 8, True),
        # Engines that cannot give their memory back, and jobs whose engines never rest.
        ({"rollout_engine": "sglang"}, 1, False),
        ({"async_rollouts": True, "use_tis": True}, 1, False),
        ({"tensor_model_parallel_size": 2}, 1, False),  # not even the ranks fit
        ({"address": "auto"}, 1, False),  # a cluster has other machines
    ],
)
def test_engines_share_the_trainers_gpus_where_there_are_none_beside_them(
    given: dict[str, Any], gpus: int, shared: bool
) -> None:
    config = on_this_machine(JobConfig(**given), gpus=gpus)
    assert config.colocate is shared
    if shared:
        check_machine(config, cores=8, gpus=gpus)
        assert config.weight_transport == "ipc"


def test_a_job_that_cannot_share_is_refused_with_what_it_would_take() -> None:
    config = on_this_machine(JobConfig(rollout_engine="sglang"), gpus=1)
    with pytest.raises(ConfigError, match=r"this machine has 1; .* share them with --colocate"):
        check_machine(config, cores=8, gpus=1)


def test_a_job_that_may_start_with_fewer_engines_needs_room_for_these(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    nodes = [
        {"Alive": True, "Resources": {"CPU": 3.0}},
        {"Alive": False, "Resources": {"CPU": 9.0}},
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    config = JobConfig(num_rollout_engines=4)
    with pytest.raises(ClusterError, match=r"4 x .1 CPU. for engines"):
        plan_on_cluster(config)
    plan = plan_on_cluster(replace(config, min_rollout_engines=2))
    assert plan.fewest_engines == 2 and len(plan.engines) == 4
    with pytest.raises(ClusterError, match=r"3 x .1 CPU. for engines"):
        plan_on_cluster(replace(config, min_rollout_engines=3))
    nodes[0]["Resources"] = {"CPU": 5.0}
    assert plan_on_cluster(replace(config, min_rollout_engines=4)).fewest_engines is None


def test_engines_that_are_reserved_one_by_one_have_bundles_of_their_own() -> None:
    together = Reservation("t", ["all"], [0])
    assert together.bundle_of_engine(2, 4) == ("all", 8)
    apart = Reservation("t", ["a", "b"], [0])
    assert apart.bundle_of_engine(1, 4) == ("b", 0)


def test_reward_workers_take_cpus_that_ranks_and_engines_leave() -> None:
    left = {"a": 3.0, "b": 1.0, "c": 0.5, "d": 40.0}
    # Half of them, 8 at most; one CPU alone stays for an actor that has to move.
    assert reward_places("auto", left, 8) == {"a": 1, "d": 8}
    assert reward_places("auto", {"a": 1.0, "b": 0.0}, 8) == {}
    # Always on the node with the most left: 2 + 2, then a, a.
    assert reward_places(4, {"a": 4.0, "b": 2.0}, 8) == {"a": 3, "b": 1}
    with pytest.raises(ClusterError, match=r"--reward-workers is 7, .* leave 6 CPUs .* lower it"):
        reward_places(7, {"a": 4.0, "b": 2.9}, 8)


def test_one_machine_is_not_starved_by_reward_workers() -> None:
    config = JobConfig(task_path="own.py:make", reward_workers=40)
    check_machine(config, cores=8, gpus=0)
    with pytest.raises(ConfigError, match=r"40: processes on 2 CPU cores, and more than 16"):
        check_machine(config, cores=2, gpus=0)


def test_cpus_are_left_where_neither_ranks_nor_engines_nor_others_have_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray
    import ray._private.state

    nodes = [
        {"NodeID": "a", "Alive": True, "Resources": {"CPU": 8.0}},
        {"NodeID": "b", "Alive": True, "Resources": {"CPU": 6.0}},
        {"NodeID": "c", "Alive": False, "Resources": {"CPU": 9.0}},
    ]
    places: dict[str, dict[str, Any]] = {
        "trainer": {"bundles": {0: {"CPU": 2.0}}, "bundles_to_node_id": {0: "a"}},
        "first": {"bundles": {0: {"CPU": 1.0}}, "bundles_to_node_id": {0: "b"}},
        "without a node": {"bundles": {0: {"CPU": 1.0}}, "bundles_to_node_id": {0: ""}},
    }
    free = {"a": {"CPU": 5.0}, "b": {"CPU": 6.0}}
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray.util, "placement_group_table", places.__getitem__)
    monkeypatch.setattr(ray._private.state, "available_resources_per_node", lambda: free)
    reservation = Reservation("trainer", ["first", "without a node"], [0])
    assert reservation.cpus_left(by_others=False) == {"a": 6.0, "b": 5.0}
    # Another job has one of a; that b has 6 free was true before the reservation.
    assert reservation.cpus_left(by_others=True) == {"a": 5.0, "b": 5.0}
