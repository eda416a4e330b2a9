"""The `sglang` and `vllm_server` engines: a server of the job's own, and the client that asks it.

The engine's actor starts the server on loopback, with random weights, and gives it every version
through a directory that both see, or has it join the trainer's process groups. The server takes no
call without the key that was made for it: other users of the machine reach loopback, too, and could
have it load weights, or run its workers' methods. The server ends with the actor. When the server
ends or falls silent, the engine raises, and the pool replaces both.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import plugin
from plugin.config import JobConfig
from plugin.config.device_defaults import engine_dtype
from plugin.engines.choice import api_key, with_architecture
from plugin.engines.protocol import (
    Answer,
    Finished,
    GenerationRequest,
    SamplingParameters,
)
from plugin.engines.servers.http_engine import HttpEngine
from plugin.engines.servers.process import ServerEnded, ServerProcess, free_port
from plugin.engines.vllm.startup import IN_PROCESS_ENVIRONMENT, cpu_options
from plugin.weights.group import WeightGroup

#: SGLang's settings in the directory of its model, which belongs to this user alone.
_SETTINGS = "server.yaml"


def make_sglang_engine(config: JobConfig, hf_config: Mapping[str, Any], name: str) -> ServedEngine:
    """An SGLang server and its client, with the settings of a job."""
    return ServedEngine(config, hf_config, name, "sglang", sglang_command)


def make_vllm_engine(config: JobConfig, hf_config: Mapping[str, Any], name: str) -> ServedEngine:
    """A vLLM server and its client, with the settings of a job."""
    return ServedEngine(config, hf_config, name, "extended vllm", vllm_command)


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
        "dtype": engine_dtype(config, cuda=torch.cuda.is_available()),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "random_seed": config.seed,
        "context_length": max_model_len,
        "max_running_requests": config.rollout_max_batch,
        "enable_metrics": True,
        "enable_return_routed_experts": config.wants_rollout_routes,
        # With the key, which everybody could read among the arguments.
        "config": str(Path(model) / _SETTINGS),
        **config.sglang_arguments(),
    }
    return ServerCommand(
        (sys.executable, "-m", "sglang.launch_server", *options(arguments)),
        # Otherwise every look at /health generates a token, behind all other requests.
        {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"},
    )


def vllm_command(config: JobConfig, model: str, port: int, max_model_len: int) -> ServerCommand:
    """A vLLM server like that, in the development mode that weight updates need."""
    size = config.rollout_num_gpus_per_engine
    dtype = engine_dtype(config, cuda=torch.cuda.is_available())
    max_batch = config.rollout_max_batch
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
        "max_logprobs": config.score_centering_topk or None,
        "max_model_len": max_model_len,
        "max_num_seqs": max_batch,
        "enable_return_routed_experts": config.wants_rollout_routes,
        "worker_extension_cls": "plugin.engines.vllm.weights.WorkerExtension",
        "middleware": "plugin.engines.vllm.startup.RequireKey",
        **given,
    }
    # What is on by default has a flag that turns it off.
    off = [f"--no-{name.replace('_', '-')}" for name, value in given.items() if value is False]
    return ServerCommand(
        (sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options(arguments), *off),
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


class ServedEngine(HttpEngine):
    """An `HttpEngine` whose one server is a child of this process.

    server: the dialect
    command: (config, model directory, port, longest sequence) -> what starts the server
    """

    def __init__(
        self,
        config: JobConfig,
        hf_config: Mapping[str, Any],
        name: str,
        server: str,
        command: Callable[[JobConfig, str, int, int], ServerCommand],
    ) -> None:
        directory = Path(tempfile.mkdtemp(prefix="megatron_tis_server_"))
        (directory / "config.json").write_text(json.dumps(with_architecture(hf_config)))
        key = api_key(config) or secrets.token_hex(32)
        (directory / _SETTINGS).write_text(f"api-key: {json.dumps(key)}\n")
        positions = int(hf_config.get("max_position_embeddings") or 4096)
        longest = min(config.max_context_length or positions, positions)
        weights = config.rollout_weights_dir or str(directory / "weights")
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        of_client = config.unchecked_copy(
            weight_sync=config.weight_transport,
            rollout_weights_dir=weights,
            max_context_length=longest,
            start_timeout=None,  # the server is ready before anything is sent to it
        )
        super().__init__(of_client, hf_config, name, urls=[url], server=server, key=key)
        start = command(config, str(directory), port, longest)
        # Without what an engine inside this process, or the one that started it, sets for itself.
        inherited = {k: v for k, v in os.environ.items() if IN_PROCESS_ENVIRONMENT.get(k) != v}
        environment = inherited | dict(start.environment) | {"VLLM_API_KEY": key}
        if not torch.cuda.is_available():
            environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        self.server = ServerProcess(
            start.command,
            environment,
            url,
            directory=directory,
            log=Path(config.run_dir or directory) / f"{name.replace(' ', '_')}.log",
        )
        self.server.wait_until_ready(config.load_patience)

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        """`ServerEnded` if the server is gone, before or after the body."""
        self.server.require_alive()
        try:
            yield
        finally:
            self.server.require_alive()

    def load_weights(self, version: int, bucket: bytes | np.ndarray, *, last: bool) -> None:
        """As `HttpEngine.load_weights`; `ServerEnded` also if the server did not load them."""
        with self._alive():
            super().load_weights(version, bucket, last=last)
        [only] = self.pool.servers
        if last and only.out_because is not None:
            raise ServerEnded(f"weight version {version}: {only.out_because}")

    def receive_weights(self, version: int, group: WeightGroup, first: int) -> None:
        """As `HttpEngine.receive_weights`."""
        with self._alive():
            super().receive_weights(version, group, first)

    def step(self) -> list[Finished]:
        """As `HttpEngine.step`; `ServerEnded` also if the server generates nothing."""
        with self._alive():
            finished = super().step()
        [only] = self.pool.servers
        if only.is_silent:
            raise ServerEnded("the server has requests but has generated nothing for too long")
        return finished

    def probe(
        self, request: GenerationRequest, parameters: SamplingParameters
    ) -> list[tuple[str, list[Answer]]]:
        """As `HttpEngine.probe`."""
        with self._alive():
            return super().probe(request, parameters)

    def close(self) -> None:
        """End the server."""
        self.server.close()
