"""Which interfaces and NCCL settings the actors of each kind of job get."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from plugin.cluster import interfaces
from plugin.cluster.interfaces import interface_of, named_interfaces, set_network
from plugin.config import JobConfig

GLOO, NCCL, CUMEM = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_CUMEM_ENABLE"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """An environment of the test's own, on a node whose address in Ray is that of own0."""
    mine: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", mine)
    monkeypatch.setattr(interfaces, "interface_of", lambda address: "own0")
    yield mine


@pytest.mark.parametrize(
    ("given", "stays", "gloo", "nccl"),
    [
        # Ranks on one node; engines may be elsewhere unless Ray is private.
        ({}, True, "lo", "=lo"),
        ({"address": "auto"}, True, "lo", "=own0"),
        ({"address": "auto"}, False, "own0", "=own0"),
        ({"address": "auto", "network_interface": "ib0"}, False, "ib0", "=ib0"),
    ],
)
def test_actors_talk_over_the_interface_of_rays_address_unless_told_otherwise(
    environment: dict[str, str], given: dict[str, Any], stays: bool, gloo: str, nccl: str
) -> None:
    config = JobConfig().unchecked_copy(**given)
    set_network(config, "10.0.0.7", gloo_stays_here=stays)
    assert (environment[GLOO], environment[NCCL]) == (gloo, nccl)
    # What the user has set stays, unless a flag says otherwise.
    environment[GLOO] = environment[NCCL] = "mine"
    set_network(config, "10.0.0.7", gloo_stays_here=stays)
    wanted = (gloo, nccl) if "network_interface" in given else ("mine", "mine")
    assert (environment[GLOO], environment[NCCL]) == wanted


def test_nccl_does_not_take_a_name_for_the_beginning_of_others() -> None:
    assert named_interfaces("eth1") == {GLOO: "eth1", NCCL: "=eth1"}
    assert named_interfaces("eth0,eth1")[NCCL] == "=eth0,eth1"


def test_an_address_without_an_interface_leaves_the_choice_to_gloo_and_nccl(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interfaces, "interface_of", lambda address: None)
    set_network(JobConfig().unchecked_copy(address="auto"), "fe80::1", gloo_stays_here=False)
    assert GLOO not in environment and NCCL not in environment


@pytest.mark.parametrize(
    ("given", "shared"),
    [
        ({"rollout_engine": "sglang"}, "0"),
        ({"rollout_engine": "http", "rollout_server": "sglang"}, "0"),
        ({"rollout_engine": "http"}, None),
        ({"rollout_engine": "vllm"}, None),
        ({}, None),
    ],
)
def test_ranks_share_memory_as_the_servers_of_their_weight_groups_do(
    environment: dict[str, str], given: dict[str, Any], shared: str | None
) -> None:
    config = JobConfig().unchecked_copy(**given)
    set_network(config, "127.0.0.1", gloo_stays_here=True)
    assert environment.get(CUMEM) == shared
    # A value of the user's holds for ranks and servers alike: SGLang keeps what is set.
    environment[CUMEM] = "1"
    set_network(config, "127.0.0.1", gloo_stays_here=True)
    assert environment[CUMEM] == "1"


def test_a_named_interface_reaches_the_workers_that_an_engine_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's own Ray workers inherit the environment of the job, not that of the engine's actor."""
    import ray

    from plugin.cluster import ray_cluster

    joined: dict[str, Any] = {}
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **given: joined.update(given))
    monkeypatch.setattr(ray_cluster, "check_address", lambda address: None)
    ray_cluster._join("10.0.0.1:6379", "ib0")
    assert named_interfaces("ib0").items() <= joined["runtime_env"]["env_vars"].items()
    assert set(named_interfaces("ib0")) == {GLOO, NCCL}


def test_an_interface_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None
