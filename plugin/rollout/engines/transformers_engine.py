"""The `transformers` engine: batched generation with a KV cache and exact log-probs, on CPU or GPU.

Prompts are padded on the left and read once however many responses they get; responses that end
leave the batch. Low precision or int8 weights make it disagree with the trainer the way a real
engine does. New weights may come between two decode steps; each token is stamped with the version
that sampled it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from plugin.config import JobConfig
from plugin.ragged import Ragged
from plugin.rollout.engines.int8_weights import quantize_linears
from plugin.rollout.engines.pause_point import PausePoint
from plugin.rollout.engines.protocol import (
    EngineHealth,
    FinishReason,
    Generation,
    GenerationRequest,
    SamplingParameters,
)
from plugin.rollout.engines.route_recorder import RecordedRoutes, RouteRecorder
from plugin.rollout.engines.sampling import draw, kept_ids, sampling_log_probs, uniform_rows
from plugin.rollout.engines.sleep import EnginePart, SleepingModel
from plugin.rollout.engines.weight_buckets import NO_WEIGHTS, WeightLoader
from plugin.rollout.engines.weight_stream import Membership, WeightGroup, WeightReceiver


def make_engine(config: JobConfig, hf_config: Mapping[str, Any], name: str) -> TransformersEngine:
    """The engine with the settings of a job."""
    return TransformersEngine(
        hf_config,
        dtype=config.rollout_dtype,
        quantization=config.rollout_quantization,
        max_batch=config.rollout_max_batch,
        interrupts=config.partial_rollout_mode if config.partial_rollouts else None,
        name=name,
    )


class TransformersEngine:
    """A `RolloutEngine` around a transformers causal language model built from its config.

    hf_config: the config as a mapping (`config.to_dict()`); weights arrive with `load_weights`
    max_batch: responses that are generated at once
    interrupts: another thread may call `load_weights` while one generates. New weights are kept
        until they are complete and take over between two decode steps; running responses then have
        their keys and values computed again (recompute), or go on with those of the old weights
        (continue). None = calls come one after the other, and weights are written as they arrive
    """

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        quantization: Literal["none", "int8"] = "none",
        max_batch: int = 256,
        interrupts: Literal["recompute", "continue"] | None = None,
        name: str = "engine",
    ) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        from plugin.rollout.engines.growing_cache import growing_cache

        self._new_cache = growing_cache
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config = AutoConfig.for_model(**hf_config)
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), trust_remote_code=False
        )
        if quantization == "int8":
            quantize_linears(model)
        self._model = model.eval().requires_grad_(False).to(self._device)
        self._loader = WeightLoader(self._model, int8=quantization == "int8")
        self._memory = SleepingModel(self._model)
        self._max_batch = max_batch
        self._interrupts = interrupts
        self._pause_point = PausePoint(waits=interrupts is not None)
        self._membership = Membership()
        self._staged: tuple[int, list[bytes | np.ndarray]] = (NO_WEIGHTS, [])
        self._name = name
        self._generated_tokens = 0

    @property
    def model(self) -> torch.nn.Module:
        """The model that generates, in evaluation mode."""
        return self._model

    def load_weights(self, version: int, bucket: bytes | np.ndarray, *, last: bool) -> None:
        """One bucket of version `version`; see `RolloutEngine`."""
        if self._interrupts is None:
            self._loader.load(version, bucket, last=last)
            return
        if self._staged[0] != version:
            self._staged = (version, [])
        buckets = self._staged[1]
        buckets.append(bucket)
        if not last:
            return
        with self._pause_point.changing():
            for number, held in enumerate(buckets):
                self._loader.load(version, held, last=number == len(buckets) - 1)
        self._staged = (NO_WEIGHTS, [])

    def weight_receivers(self) -> int:
        """One: this process."""
        return 1

    def receive_weights(self, version: int, group: WeightGroup, first: int) -> None:
        """Take all of `version` in place; see `BroadcastEngine`. Running responses wait for it."""
        with self._membership.of(group, lambda: WeightReceiver(group, first)) as receiver:
            receiver.meet(version)
            with self._pause_point.changing():
                self._loader.begin(version)
                receiver.receive(version, self._loader.take)
                self._loader.end()

    def sleep(self, level: int) -> None:
        """Give up the model's memory, and with it the version."""
        self._loader.version = NO_WEIGHTS
        self._memory.sleep(level)

    def wake(self, part: EnginePart) -> None:
        """Take it again; caches are made with every batch."""
        if part == "weights":
            self._memory.wake()

    def health(self) -> EngineHealth:
        """Version of the weights and tokens generated so far."""
        return EngineHealth(self._name, self._loader.version, self._generated_tokens)

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[GenerationRequest], parameters: SamplingParameters
    ) -> list[list[Generation]]:
        """For each request, one generation per seed, in order."""
        with self._pause_point.generating():
            return self._generate(requests, parameters)

    def _generate(
        self, requests: Sequence[GenerationRequest], parameters: SamplingParameters
    ) -> list[list[Generation]]:
        self._loader.require_complete(self._name)
        flat: list[Generation] = []
        for part in _parts(requests, self._max_batch):
            rows = _Rows(part, parameters)
            recorder = RouteRecorder(self._model) if parameters.routed_experts else None
            try:
                self._fill(rows, recorder, parameters)
            finally:
                if recorder is not None:
                    recorder.close()
            flat += rows.generations()
        self._generated_tokens += sum(generation.tokens.numel() for generation in flat)
        by_row = iter(flat)
        return [list(itertools.islice(by_row, len(request.seeds))) for request in requests]

    def _fill(
        self, rows: _Rows, recorder: RouteRecorder | None, parameters: SamplingParameters
    ) -> None:
        """Read the prompts once, then sample token by token over the rows that are still open."""
        prompts, mask = _left_padded([request.prompt for request in rows.requests])
        cache = self._new_cache(self._model.config)
        output = self._forward(prompts, mask, cache)
        if recorder is not None:
            rows.add_prompt_routes(recorder.take(len(prompts)), mask)
        counts = torch.tensor([len(request.seeds) for request in rows.requests])
        source = torch.arange(len(counts)).repeat_interleave(counts)
        cache.batch_select_indices(source.to(self._device))
        logits, mask = output.logits[:, -1][source.to(self._device)], mask[source]
        open_rows = torch.arange(len(source))
        while len(open_rows):
            distribution = sampling_log_probs(logits, parameters)
            tokens, log_probs = draw(distribution, rows.uniforms(open_rows).to(self._device))
            if parameters.sampling_mask:
                rows.add_kept_ids(open_rows, kept_ids(distribution))
            tokens = tokens.cpu()
            version = self._loader.version
            still_open = rows.add_tokens(open_rows, tokens, log_probs.cpu(), version)
            # The engine never reads a response's last token, unless its routes are wanted.
            reads = torch.ones_like(still_open) if recorder is not None else still_open
            open_rows, mask, tokens = open_rows[reads], mask[reads], tokens[reads]
            if not len(open_rows):
                return
            if not bool(reads.all()):
                cache.batch_select_indices(reads.nonzero().flatten().to(self._device))
            if self._changed_in_pause() and self._interrupts == "recompute":
                # All that was read so far, with the new weights; routes recorded before stay.
                context, mask = _left_padded(rows.contexts(open_rows))
                cache = self._new_cache(self._model.config)
                output = self._forward(context, mask, cache)
            else:
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
                output = self._forward(tokens[:, None], mask, cache)
            logits = output.logits[:, -1]
            if recorder is not None:
                rows.add_response_routes(open_rows, recorder.take(len(tokens)).of_last_token())
                kept = still_open.nonzero().flatten()
                open_rows, mask = open_rows[kept], mask[kept]
                logits = logits[kept.to(self._device)]
                cache.batch_select_indices(kept.to(self._device))

    def _changed_in_pause(self) -> bool:
        """Let new weights in, if any wait; whether there were some."""
        if not self._pause_point.pause():
            return False
        self._loader.require_complete(self._name)
        return True

    def _forward(self, tokens: Tensor, mask: Tensor, cache: Any) -> Any:
        """One forward pass over `tokens` [B, S], the last S columns of `mask` [B, past + S]."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        return self._model(
            input_ids=tokens.to(self._device),
            attention_mask=mask.to(self._device),
            position_ids=positions.to(self._device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )


class _Rows:
    """The responses of one batch while they grow; row r belongs to one (request, seed)."""

    def __init__(
        self, requests: Sequence[GenerationRequest], parameters: SamplingParameters
    ) -> None:
        self.requests = requests
        self._owners = [number for number, request in enumerate(requests) for _ in request.seeds]
        self._parameters = parameters
        seeds = [seed for request in requests for seed in request.seeds]
        length = parameters.max_response_length
        self._uniforms = uniform_rows(seeds, length)
        self._tokens = torch.zeros(len(seeds), length, dtype=torch.int64)
        self._log_probs = torch.zeros(len(seeds), length)
        self._versions = torch.zeros(len(seeds), length, dtype=torch.int64)
        self._lengths = torch.zeros(len(seeds), dtype=torch.int64)
        self._stopped = torch.zeros(len(seeds), dtype=torch.bool)
        self._stop_tokens = torch.tensor(parameters.stop_token_ids, dtype=torch.int64)
        self._prompt_routes: list[RecordedRoutes] = []
        self._routes: list[list[RecordedRoutes]] = [[] for _ in seeds]
        self._kept: list[list[Tensor]] = [[] for _ in seeds]

    def uniforms(self, rows: Tensor) -> Tensor:
        """[len(rows)] random numbers of the next position; open rows have one length."""
        return self._uniforms[rows, self._lengths[rows]]

    def contexts(self, rows: Tensor) -> list[tuple[int, ...]]:
        """Prompt and response so far of each of `rows`."""
        return [
            (*self.requests[self._owners[row]].prompt, *self._tokens[row, :length].tolist())
            for row, length in zip(rows.tolist(), self._lengths[rows].tolist(), strict=True)
        ]

    def add_tokens(
        self, rows: Tensor, tokens: Tensor, log_probs: Tensor, weight_version: int
    ) -> Tensor:
        """Appends one token to each of `rows`; returns which of them go on."""
        position = self._lengths[rows]
        self._tokens[rows, position] = tokens
        self._log_probs[rows, position] = log_probs
        self._versions[rows, position] = weight_version
        self._lengths[rows] += 1
        stopped = torch.isin(tokens, self._stop_tokens)
        self._stopped[rows] = stopped
        return ~stopped & (self._lengths[rows] < self._parameters.max_response_length)

    def add_prompt_routes(self, routes: RecordedRoutes, mask: Tensor) -> None:
        """Take `routes` [requests, S, layers, topk]; `mask` [requests, S] is 0 at padding."""
        self._prompt_routes = [
            RecordedRoutes(experts[kept], weights[kept])
            for experts, weights, kept in zip(*routes, mask.bool(), strict=True)
        ]

    def add_response_routes(self, rows: Tensor, routes: RecordedRoutes) -> None:
        """`routes` [len(rows), 1, layers, topk] of the tokens just read."""
        for row, experts, weights in zip(rows.tolist(), *routes, strict=True):
            self._routes[row].append(RecordedRoutes(experts, weights))

    def add_kept_ids(self, rows: Tensor, kept: list[Tensor]) -> None:
        """One entry of ids for each of `rows`, of the tokens about to be added."""
        for row, ids in zip(rows.tolist(), kept, strict=True):
            self._kept[row].append(ids)

    def generations(self) -> list[Generation]:
        """The finished responses, in the order of the rows."""
        return [self._generation(number, row) for row, number in enumerate(self._owners)]

    def _generation(self, request: int, row: int) -> Generation:
        length = int(self._lengths[row])
        parameters, experts, weights = self._parameters, None, None
        if parameters.routed_experts:
            parts = [self._prompt_routes[request], *self._routes[row]]
            experts, weights = map(torch.cat, zip(*parts, strict=True))
        reason: FinishReason = "stop" if bool(self._stopped[row]) else "length"
        return Generation(
            tokens=self._tokens[row, :length].clone(),
            finish_reason=reason,
            weight_version=self._versions[row, :length].clone(),
            log_probs=self._log_probs[row, :length].clone() if parameters.log_probs else None,
            routed_experts=experts,
            routed_weights=weights if parameters.routed_weights else None,
            sampling_mask=Ragged.of(self._kept[row]) if parameters.sampling_mask else None,
        )


def _left_padded(prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Tokens and mask [B, longest], padded on the left."""
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return tokens, mask


def _parts(requests: Sequence[GenerationRequest], max_batch: int) -> list[list[GenerationRequest]]:
    """Requests in batches of at most `max_batch` responses; one with more seeds is split."""
    parts: list[list[GenerationRequest]] = []
    held = max_batch
    for request in requests:
        for start in range(0, len(request.seeds), max_batch):
            seeds = request.seeds[start : start + max_batch]
            if held + len(seeds) > max_batch:
                parts.append([])
                held = 0
            parts[-1].append(GenerationRequest(request.prompt, seeds))
            held += len(seeds)
    return parts
