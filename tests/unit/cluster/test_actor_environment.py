"""Which variables of the driver the actors on a running cluster are given."""

from __future__ import annotations

import json

from plugin.cluster.ray_cluster import actor_environment


def test_actors_get_what_they_read_and_neither_secrets_nor_what_is_a_nodes_own() -> None:
    wanted = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "NCCL_IB_HCA": "mlx5",
        "HF_HOME": "/models/hf",
        "VLLM_USE_V1": "1",
    }
    others = {
        "PATH": "/bin",
        "HOME": "/root",
        "VLLM_HOST_IP": "10.0.0.1",
        "VLLM_API_KEY": "secret",
        "HF_TOKEN": "secret",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    assert actor_environment(wanted | others) == wanted


def test_variables_of_a_submitted_job_are_not_given_again() -> None:
    submitted = {"runtime_env": {"env_vars": {"NCCL_DEBUG": "INFO"}}, "metadata": {}}
    environment = {
        "NCCL_DEBUG": "INFO",
        "NCCL_IB_HCA": "mlx5",
        "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(submitted),
    }
    assert actor_environment(environment) == {"NCCL_IB_HCA": "mlx5"}
    environment["RAY_JOB_CONFIG_JSON_ENV_VAR"] = json.dumps({"metadata": {}})
    assert set(actor_environment(environment)) == {"NCCL_DEBUG", "NCCL_IB_HCA"}
