"""The `vllm` engine: vLLM itself, inside the engine's process, on CPU or GPUs.

With several GPUs (or CPU slots) vLLM has a worker process for each, which ends with the engine's
process; where they are on several nodes, the workers are Ray actors. The model is built from its
config with no weights. By broadcast, the workers load a version layer by layer as it arrives. A
version that comes in buckets through this process is kept until it is complete and then loaded in
place, at the price of one copy of the weights in host memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from plugin.config import JobConfig
from plugin.config.device_defaults import engine_dtype
from plugin.config.engines import ENGINES
from plugin.engines.expert_routes import RouteShape, complete_routes
from plugin.engines.protocol import (
    Answer,
    EnginePart,
    Finished,
    Generation,
    GenerationFailure,
    GenerationRequest,
    SamplingParameters,
)
from plugin.engines.response_stream import GeneratesBySteps
from plugin.engines.servers.answers import kept_rows, sampler_head
from plugin.engines.servers.calls import MalformedAnswer
from plugin.engines.transformers.weight_loader import weight_ledger
from plugin.engines.vllm.startup import (
    AdapterShape,
    build_llm,
    parallel_options,
    request_with_adapters,
    require_interrupts,
    shared_memory_options,
)
from plugin.engines.weight_changes import PausePoint
from plugin.errors import ConfigError, DeltaError, EngineError, TransferError, WeightError
from plugin.weights.buckets import NO_WEIGHTS
from plugin.weights.checksums import Checksums, joined
from plugin.weights.group import WeightGroup

#: vLLM raises lower temperatures to this one without saying so in the answer.
_LOWEST_TEMPERATURE = ENGINES["vllm"].lowest_temperature


class VllmEngine(GeneratesBySteps):
    """A `RolloutEngine` around `vllm.LLM`.

    hf_config: the config as a mapping (`config.to_dict()`); weights arrive with `load_weights`

    With --partial-rollouts another thread may call `load_weights` while one generates: between two
    tokens running responses are preempted, and read again with the new weights.
    """

    def __init__(self, config: JobConfig, hf_config: Mapping[str, Any], name: str) -> None:
        self._adapters: AdapterShape | None = None
        scale = None
        if config.syncs_adapters:
            self._adapters = AdapterShape(config.lora_rank, config.lora_alpha)
            scale = config.lora_alpha / config.lora_rank
        super().__init__(name, weight_ledger(hf_config, lora_scale=scale))
        self._interrupts, self._max_batch = config.interrupts_responses, config.rollout_max_batch
        self._pause_point = PausePoint(waits=self._interrupts)
        # Responses under way by vLLM's name for them: ticket, place, request, parameters.
        self._open: dict[str, tuple[int, int, GenerationRequest, SamplingParameters]] = {}
        self._unbegun: list[str] = []
        self._failed: list[Finished] = []
        self._buckets: list[bytes] = []
        positions = int(hf_config.get("max_position_embeddings") or 4096)
        self._max_model_len = min(config.max_context_length or positions, positions)
        self._vocab_size = int(hf_config["vocab_size"])
        self._routes = RouteShape.of(hf_config)
        self._workers = config.rollout_num_gpus_per_engine
        # vLLM on CPU has no memory that it could give up.
        self._gives_memory = bool(config.colocate) and torch.cuda.is_available()
        share = shared_memory_options(config.vllm_arguments()) if self._gives_memory else {}
        further = parallel_options(self._workers) | share | config.vllm_arguments()
        if config.wants_rollout_routes:
            further["enable_return_routed_experts"] = True
        if config.replays_sampling_mask:
            further["return_sampling_mask"] = True
        if config.score_centering_topk:
            further["max_logprobs"] = config.score_centering_topk
        if self._adapters is not None:
            further |= self._adapters.start_options()
        self._awake: set[EnginePart] = {"weights", "cache"}
        if self._gives_memory:
            further["enable_sleep_mode"] = True
        self._dtype = dtype = engine_dtype(config, cuda=torch.cuda.is_available())
        self._base_dtype = dtype if config.weight_transport == "delta" else None
        self._llm = build_llm(
            *(hf_config, dtype, self._max_batch, self._max_model_len, further),
            one_machine=config.address is None,
        )
        if self._interrupts:
            require_interrupts(self._llm.llm_engine)

    def load_weights(self, version: int, bucket: bytes, *, last: bool) -> None:
        """Take a bucket; see `RolloutEngine`. The last one replaces the weights."""
        from plugin.engines.vllm.weights import reload_from_buckets

        if not self._weights.is_partial:
            self._buckets = []
        self._weights.load(version, bucket, last=False)
        self._buckets.append(bucket)
        if not last:
            return
        # If tensors are missing, this raises, and they may follow.
        self._weights.end()
        buckets, self._buckets = self._buckets, []
        with self._pause_point.changing():
            # Until vLLM has the weights, the engine has no version that it could answer for.
            self._weights.version = NO_WEIGHTS
            engine = self._llm.llm_engine
            for refusal in engine.collective_rpc(reload_from_buckets, args=(buckets,)):
                self._require_usable(refusal)
            self._finish_change(version)
            self._weights.version = version

    def weight_receivers(self) -> int:
        """The workers that share the model."""
        return self._workers

    def weight_devices(self) -> list[str]:
        """The devices of the workers."""
        return self._llm.llm_engine.collective_rpc("device_id")

    def receive_weights(self, version: int, group: WeightGroup, first: int) -> None:
        """Take all of `version` in the workers, layer by layer; see `BroadcastEngine`."""
        with self._pause_point.changing():
            self._weights.begin(version)
            place = {"group": vars(group), "first": first, "base_dtype": self._base_dtype}
            self._llm.init_weight_transfer_engine({"init_info": place})
            self._llm.start_weight_update()
            self._llm.update_weights({"update_info": {"version": version}})
            self._llm.finish_weight_update()
            received = self._llm.llm_engine.collective_rpc("received_weights")
            for worker in received:
                if worker.aborted is not None:
                    raise TransferError(f"{self._name}: {worker.aborted}")
            for worker in received:
                if worker.damaged is not None:
                    raise DeltaError(f"{self._name}: {worker.damaged}")
                self._require_usable(worker.refused)
            self._weights.take(
                (spec.name, torch.empty(spec.shape, dtype=spec.dtype, device="meta"))
                for spec in received[0].specs
            )
            if self._adapters is not None:
                self._use_adapters(self._adapters)
            self._finish_change(version)
            self._weights.end()

    def weight_checksums(self) -> Checksums:
        """Of the weights that the workers compute with; see `answer_probe`."""
        engine = self._llm.llm_engine
        return joined(engine.collective_rpc("weight_checksums", args=(self._dtype,)))

    def _use_adapters(self, shape: AdapterShape) -> None:
        for refusal in self._llm.llm_engine.collective_rpc("use_adapters", args=(shape,)):
            if refusal is not None:
                raise ConfigError(
                    f"--lora-sync adapter: vLLM refuses the adapters ({refusal}); use --lora-sync "
                    "merged"
                )

    def _require_usable(self, refusal: str | None) -> None:
        if refusal is not None:
            raise WeightError(f"{self._name}: {refusal}")

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
        self._weights.version = NO_WEIGHTS
        if self._awake and self._gives_memory:
            self._llm.sleep(level=level)
        self._awake = set()

    def wake(self, part: EnginePart) -> None:
        """Take memory for the weights, or for the cache of keys and values, again."""
        if part not in self._awake and self._gives_memory:
            self._llm.wake_up(tags=["weights" if part == "weights" else "kv_cache"])
        self._awake.add(part)

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
        if parameters.temperature < _LOWEST_TEMPERATURE:
            raise ConfigError(
                f"temperature {parameters.temperature} is below {_LOWEST_TEMPERATURE}, to which "
                "vLLM raises it; the log-probs would be of a different distribution than the "
                "trainer's; choose a higher one"
            )
        room = self._max_model_len - len(request.prompt)
        for place in range(len(request.seeds)):
            if room < 1:
                failure = GenerationFailure(
                    f"a prompt of {len(request.prompt)} tokens leaves no room for a response in "
                    f"vLLM's {self._max_model_len}; raise --max-context-length or shorten the "
                    "prompts"
                )
                self._failed.append(Finished(ticket, place, failure))
                continue
            self._open[f"{ticket}-{place}"] = (ticket, place, request, parameters)
            self._unbegun.append(f"{ticket}-{place}")

    def step(self) -> list[Finished]:
        """One token for every response under way; those that are complete."""
        finished, self._failed = self._failed, []
        if not self._open:
            return finished
        with self._pause_point.generating():
            if not self._interrupts or self._weights.version == NO_WEIGHTS:
                self._weights.require_complete(self._name)
            for name in self._unbegun:
                _, place, request, parameters = self._open[name]
                sampling = self._sampling_params(request, place, parameters)
                prompt = {"prompt_token_ids": list(request.prompt)}
                adapters = None if self._adapters is None else request_with_adapters()
                self._llm.llm_engine.add_request(name, prompt, sampling, lora_request=adapters)
            self._unbegun.clear()
            outputs = self._llm.llm_engine.step()
            self.progress += len(self._open)
        for output in outputs:
            if output.finished:
                ticket, place, request, parameters = self._open.pop(output.request_id)
                answer = self._read(request, parameters, output.outputs[0])
                finished.append(Finished(ticket, place, answer))
        return self._counted(finished)

    def _sampling_params(
        self, request: GenerationRequest, place: int, parameters: SamplingParameters
    ) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        room = self._max_model_len - len(request.prompt)
        return SamplingParams(
            temperature=parameters.temperature,
            top_p=parameters.top_p,
            top_k=parameters.top_k or 0,
            seed=request.seeds[place],
            max_tokens=min(room, parameters.max_response_length),
            stop_token_ids=list(parameters.stop_token_ids),
            # Only the task's stop tokens end a response.
            ignore_eos=True,
            logprobs=parameters.head if parameters.log_probs else None,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _read(
        self, request: GenerationRequest, parameters: SamplingParameters, completion: Any
    ) -> Answer:
        """The answer in vLLM's output, with the version of the engine's weights now."""
        if completion.finish_reason not in ("stop", "length"):
            return GenerationFailure(f"vLLM ended the response with {completion.finish_reason!r}")
        tokens = torch.tensor(list(completion.token_ids), dtype=torch.int64)
        log_probs = routes = kept = None
        if parameters.log_probs and completion.logprobs is not None:
            pairs = zip(completion.token_ids, completion.logprobs, strict=True)
            log_probs = torch.tensor([position[token].logprob for token, position in pairs])
            if not bool(log_probs.isfinite().all()):
                return GenerationFailure("vLLM reported a log-prob that is not finite")
        head = None
        if parameters.head and completion.logprobs is not None:
            likeliest = [[(id, one.logprob) for id, one in p.items()] for p in completion.logprobs]
            try:
                head = sampler_head(likeliest, tokens.numel(), parameters.head, self._vocab_size)
            except MalformedAnswer as error:
                return GenerationFailure(f"vLLM: {error}")
        if parameters.routed_experts and completion.routed_experts is not None:
            length = len(request.prompt) + tokens.numel()
            found = torch.as_tensor(completion.routed_experts)
            routes = complete_routes(found, length, self._routes)
        if parameters.sampling_mask:
            try:
                rows = mask_rows(getattr(completion, "sampling_mask", None))
                kept = kept_rows(rows, tokens, self._vocab_size)
            except MalformedAnswer as error:
                return GenerationFailure(f"vLLM: {error}")
        return Generation(
            tokens=tokens,
            finish_reason=completion.finish_reason,
            weight_version=self._versions(completion),
            log_probs=log_probs,
            routed_experts=routes,
            sampling_mask=kept,
            head=head,
        )

    def _versions(self, completion: Any) -> int | Tensor:
        """The version of the weights that sampled every token, or [response] of each."""
        version = self._weights.version
        spans = getattr(completion, "weight_versions", None) or ()
        wrong = [span for span in spans if span.version != str(version)]
        if not wrong:
            return version
        if not self._interrupts:
            raise EngineError(
                f"{self._name}: vLLM generated with weight version {wrong[0].version}, expected "
                f"{version}"
            )
        return torch.cat([torch.full((s.end - s.start,), int(s.version)) for s in spans])

    def abort(self) -> None:
        """Forget the responses under way."""
        begun = [name for name in self._open if name not in self._unbegun]
        if begun:
            self._llm.llm_engine.abort_request(begun)
        self._open.clear()
        self._unbegun.clear()
        self._failed.clear()


def mask_rows(mask: Any) -> list[list[int]] | None:
    """The kept ids of every token, of a vLLM that reports lists or flat ids with offsets."""
    if mask is None:
        return None
    offsets = getattr(mask, "offsets", None)
    if offsets is None:
        return [list(map(int, row)) for row in mask.token_ids]
    ids = list(map(int, mask.token_ids))
    return [ids[start:end] for start, end in itertools.pairwise(offsets)]
