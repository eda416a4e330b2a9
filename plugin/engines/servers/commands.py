"""The command lines of inference servers that the job starts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import plugin
from plugin.config import JobConfig
from plugin.engines.vllm.on_cpu import cpu_options


@dataclass(frozen=True)
class ServerCommand:
    """What starts a server, and what is added to its environment."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


def sglang_command(config: JobConfig, model: str, port: int, max_model_len: int) -> ServerCommand:
    """An SGLang server on loopback with random weights and no tokenizer.

    model: directory of the model's config; max_model_len: tokens of prompt and response together
    """
    arguments: dict[str, Any] = {
        "model_path": model,
        "host": "127.0.0.1",
        "port": port,
        "tp_size": config.rollout_num_gpus_per_engine,
        "dtype": config.rollout_dtype,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "random_seed": config.seed,
        "context_length": max_model_len,
        "max_running_requests": config.rollout_max_batch,
        "enable_return_routed_experts": config.wants_rollout_routes,
        **config.sglang_arguments(),
    }
    return ServerCommand(
        (sys.executable, "-m", "sglang.launch_server", *options(arguments)),
        # Otherwise every look at /health generates a token, behind all other requests.
        {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"},
    )


def vllm_command(config: JobConfig, model: str, port: int, max_model_len: int) -> ServerCommand:
    """A vLLM server in the same way, in the development mode that weight updates need."""
    size = config.rollout_num_gpus_per_engine
    dtype, max_batch = config.rollout_dtype, config.rollout_max_batch
    given = config.vllm_arguments()
    if not torch.cuda.is_available():
        hf_config = json.loads((Path(model) / "config.json").read_text())
        given = cpu_options(hf_config, dtype, max_batch, max_model_len, given)
    # The workers import the extension, also where this package is not installed.
    paths = [str(Path(plugin.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    arguments: dict[str, Any] = {
        "model": model,
        "host": "127.0.0.1",
        "port": port,
        "tensor_parallel_size": size,
        "distributed_executor_backend": "mp" if size > 1 else "uni",
        "dtype": dtype,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "max_model_len": max_model_len,
        "max_num_seqs": max_batch,
        "enable_return_routed_experts": config.wants_rollout_routes,
        "disable_log_stats": True,
        "worker_extension_cls": "plugin.engines.vllm.weights.WorkerExtension",
        **given,
    }
    return ServerCommand(
        (sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options(arguments)),
        {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        },
    )


def options(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments as flags: `True` stands alone, `False` and None are left out, lists are spread."""
    found: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        found.append("--" + name.replace("_", "-"))
        if value is True:
            continue
        if isinstance(value, Sequence) and not isinstance(value, str):
            found += map(str, value)
        else:
            found.append(json.dumps(value) if isinstance(value, Mapping) else str(value))
    return found
