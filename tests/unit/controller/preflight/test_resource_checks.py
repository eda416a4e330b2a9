"""What is said about machines that are too small for a job, before it starts."""

from __future__ import annotations

import pytest

from plugin.config import JobConfig
from plugin.controller.preflight.resource_checks import (
    RayMachine,
    refuse_few_files,
    refuse_large_copies,
    rollout_bytes,
    store_warnings,
)
from plugin.errors import ConfigError

GIB = 2**30
ROOMY = RayMachine(shared_memory=64 * GIB, spill_free=500 * GIB)


def test_a_job_of_more_processes_than_files_is_refused_with_the_number_it_needs() -> None:
    config = JobConfig(num_gpus_per_node=64, num_rollout_engines=64)
    refuse_few_files(config, 256 + 16 * 128)
    with pytest.raises(ConfigError, match=r"may open 1024 files .* need about 2304; .*ulimit -n"):
        refuse_few_files(config, 1024)


def test_copies_for_deltas_are_one_of_the_trainer_and_one_of_every_worker_of_vllm() -> None:
    assert refuse_large_copies(JobConfig(), 60 * GIB, GIB) == 0
    assert refuse_large_copies(JobConfig(weight_sync="delta"), 60 * GIB, 64 * GIB) == 60 * GIB
    config = JobConfig(
        weight_sync="delta",
        rollout_engine="vllm",
        num_rollout_engines=2,
        rollout_num_gpus_per_engine=4,
    )
    assert refuse_large_copies(config, 60 * GIB, 9 * 60 * GIB) == 9 * 60 * GIB
    with pytest.raises(
        ConfigError, match=r"keeps 9 copies of 60\.0 GiB .*\(1 of the trainer, 4 of"
    ):
        refuse_large_copies(config, 60 * GIB, 512 * GIB)


def test_the_bytes_of_a_rollout_follow_from_its_samples_tokens_and_routes() -> None:
    config = JobConfig(
        rollout_batch_size=4, n_samples_per_prompt=2, max_prompt_length=30, max_response_length=70
    )
    assert rollout_bytes(config, None) == 8 * 100 * 64
    routes = config.unchecked_copy(use_rollout_routing_replay=True)
    # 3 layers x 2 experts of a byte each, from the engine and to the ranks
    assert rollout_bytes(routes, (3, 2, 128)) == 8 * 100 * (64 + 2 * 6)
    assert rollout_bytes(routes, (3, 2, 512)) == 8 * 100 * (64 + 2 * 12)
    assert rollout_bytes(config, (3, 2, 128)) == 8 * 100 * 64  # not asked for


def test_what_fits_is_not_mentioned_and_what_does_not_is_one_line_with_the_flag_to_change() -> None:
    joined = JobConfig(address="10.0.0.1:6379")
    stores = {"10.0.0.1": 20 * GIB, "10.0.0.2": 10 * GIB}
    assert not list(store_warnings(joined, 10 * GIB, stores, ROOMY))
    [line] = store_warnings(joined, 15 * GIB, stores, ROOMY)
    assert "up to 15.0 GiB and Ray's object store on 10.0.0.2 10.0 GiB" in line
    assert "--object-store-memory 20000000000 on every node" in line  # 1.2 x 15 GiB
    [line] = store_warnings(joined, 15 * GIB, stores, RayMachine(64 * GIB, 2 * GIB))
    assert "has 2.0 GiB left" in line


def test_a_private_ray_without_shared_memory_says_how_to_mount_more() -> None:
    machine = RayMachine(shared_memory=64 << 20, spill_free=500 * GIB)
    stores = {"127.0.0.1": 7 * GIB}
    [line] = store_warnings(JobConfig(), GIB, stores, machine)
    assert line.startswith("/dev/shm has 64 MiB") and line.endswith("--shm-size 7g)")
    assert not list(store_warnings(JobConfig(), GIB, stores, ROOMY))
