"""The `transformers` engine: continuous batching with a KV cache and exact log-probs, CPU or GPU.

Prompts are read once however many responses they get, and without padding where attention keeps
every position; responses join and leave between two decode steps. Low precision or int8 weights
make it disagree with the trainer the way a real engine does. New weights may come between two
decode steps; each token is stamped with the version that sampled it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from plugin.batch_types import SamplerHead
from plugin.config import JobConfig
from plugin.config.device_defaults import engine_dtype
from plugin.config.model import DtypeName
from plugin.engines.choice import check_engine_model
from plugin.engines.protocol import (
    EnginePart,
    Finished,
    GenerationRequest,
    SamplingParameters,
)
from plugin.engines.response_stream import GeneratesBySteps
from plugin.engines.transformers.decode_batch import DecodeBatch, use_decode_attention
from plugin.engines.transformers.linear_layers import PackedLinears, quantize_linears
from plugin.engines.transformers.response_table import ResponseTable, RouteRecorder
from plugin.engines.transformers.sampling import draw, kept_ids, sampling_log_probs
from plugin.engines.transformers.weight_loader import WeightLoader
from plugin.engines.weight_changes import PausePoint
from plugin.host_storage import SleepingModel
from plugin.weights import make_receiver
from plugin.weights.buckets import NO_WEIGHTS
from plugin.weights.checksums import Checksums
from plugin.weights.delta import DeltaReader, by_kind
from plugin.weights.group import Membership, WeightGroup
from plugin.weights.ipc import device_id

#: Share of rows that must be free before responses join, which reads prompts and copies the cache.
_SHARE_THAT_JOINS = 1 / 4
#: Logits that are sampled from at once on CPU, so that what is computed stays in its caches.
_SAMPLED_AT_ONCE = 2**19


def make_engine(config: JobConfig, hf_config: Mapping[str, Any], name: str) -> TransformersEngine:
    """The engine with the settings of a job."""
    check_engine_model(config, hf_config)
    return TransformersEngine(
        hf_config,
        dtype=engine_dtype(config, cuda=torch.cuda.is_available()),
        quantization=config.rollout_quantization,
        max_batch=config.rollout_max_batch,
        interrupts=config.partial_rollout_mode if config.interrupts_responses else None,
        lora_scale=config.lora_scale if config.syncs_adapters else None,
        name=name,
    )


class TransformersEngine(GeneratesBySteps):
    """A `RolloutEngine` around a transformers causal language model built from its config.

    hf_config: the config as a mapping (`config.to_dict()`); weights arrive with `load_weights`
    max_batch: responses that are generated at once
    interrupts: another thread may call `load_weights` while one generates. New weights are kept
        until they are complete and take over between two decode steps; running responses then have
        their keys and values computed again (recompute), or go on with those of the old weights
        (continue). None = calls come one after the other, and weights are written as they arrive
    lora_scale: of adapters that come with the weights (--lora-sync adapter)
    """

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        *,
        dtype: DtypeName = "float32",
        quantization: Literal["none", "int8"] = "none",
        max_batch: int = 256,
        interrupts: Literal["recompute", "continue"] | None = None,
        lora_scale: float | None = None,
        name: str = "engine",
    ) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        from plugin.engines.transformers.growing_cache import growing_cache, grows

        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config = AutoConfig.for_model(**hf_config)
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), trust_remote_code=False
        )
        if quantization == "int8":
            quantize_linears(model)
        packs = use_decode_attention(model) and grows(growing_cache(model.config))
        self._model = model.eval().requires_grad_(False).to(self._device)
        self._packed = PackedLinears(self._model)
        weights = WeightLoader(self._model, int8=quantization == "int8", lora_scale=lora_scale)
        super().__init__(name, weights)
        self._memory = SleepingModel(self._model)
        self._max_batch = max_batch
        self._interrupts = interrupts
        self._pause_point = PausePoint(waits=interrupts is not None)
        self._membership = Membership()
        self._staged: tuple[int, list[bytes | np.ndarray]] = (NO_WEIGHTS, [])
        self._batch = DecodeBatch(
            self._forward, lambda: growing_cache(self._model.config), packs=packs
        )
        self._table = ResponseTable(SamplingParameters(max_response_length=1), max_batch)
        self._joining: list[tuple[int, GenerationRequest, SamplingParameters]] = []
        self._last_read = torch.empty(0, dtype=torch.int64)
        self._recorder: RouteRecorder | None = None
        self._read_with = NO_WEIGHTS

    @property
    def model(self) -> torch.nn.Module:
        """The model that generates, in evaluation mode."""
        return self._model

    def load_weights(self, version: int, bucket: bytes | np.ndarray, *, last: bool) -> None:
        """One bucket of version `version`; see `RolloutEngine`."""
        if self._interrupts is None:
            self._weights.load(version, bucket, last=last)
            return
        if self._staged[0] != version:
            self._staged = (version, [])
        buckets = self._staged[1]
        buckets.append(bucket)
        if not last:
            return
        with self._pause_point.changing():
            for number, held in enumerate(buckets):
                self._weights.load(version, held, last=number == len(buckets) - 1)
        self._staged = (NO_WEIGHTS, [])

    def weight_receivers(self) -> int:
        """1: this process."""
        return 1

    def weight_devices(self) -> list[str]:
        """The device of this process."""
        return [device_id()]

    def receive_weights(self, version: int, group: WeightGroup, first: int) -> None:
        """Take all of `version` in place; see `BroadcastEngine`. Running responses wait for it."""
        with self._membership.of(group, lambda: make_receiver(group, first)) as receiver:
            receiver.barrier(version)
            with self._pause_point.changing():
                since = NO_WEIGHTS if self._weights.is_partial else self._weights.version
                self._weights.begin(version)
                delta = DeltaReader(self._weights.place_of, since)
                receiver.receive(version, by_kind(self._weights.take, delta))
                delta.require_exact(self._name)
                self._weights.end()

    def weight_checksums(self) -> Checksums | None:
        """Of the weights that it computes with; see `answer_probe`."""
        return self._weights.checksums()

    def sleep(self, level: int) -> None:
        """Give up the model's memory, and with it the version."""
        self._weights.version = NO_WEIGHTS
        self._packed.clear()
        self._memory.sleep(level)

    def wake(self, part: EnginePart) -> None:
        """Take it again; caches are made with every batch."""
        if part == "weights":
            self._memory.wake()

    @property
    def running(self) -> int:
        """Responses that were added and have not finished."""
        return len(self._table) + sum(len(request.seeds) for _, request, _ in self._joining)

    @property
    def room(self) -> int:
        """How many responses may join at the next step; few free rows are not worth the copy."""
        free = self._max_batch - self.running
        worth = free >= self._max_batch * _SHARE_THAT_JOINS or bool(self._joining)
        return free if self._batch.is_open and worth else 0

    def add(self, ticket: int, request: GenerationRequest, parameters: SamplingParameters) -> None:
        """Have the responses to a request join at the next step; see `SteppingEngine`."""
        self._joining.append((ticket, request, parameters))

    def abort(self) -> None:
        """Forget the responses under way."""
        self._joining.clear()
        self._batch.clear()
        self._table = ResponseTable(self._table.parameters, self._max_batch)
        self._stop_recording()

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """One token for every response under way; those that are complete."""
        with self._pause_point.generating():
            self._weights.require_complete(self._name)
            self._packed.follow(self._weights.version)
            if not len(self._table) and self._joining:
                self._begin(self._joining[0][2])
            finished, read = self._read()
            if self._joining:
                read.append(self._join())
            self._read_with = self._weights.version
            if read:
                self.progress += sum(len(slots) for slots, _ in read)
                # One part is not copied: logits are the largest tensor of a step.
                parts = read[0] if len(read) == 1 else map(torch.cat, zip(*read, strict=True))
                finished += self._sample(*parts)
        if not len(self._table):
            self._stop_recording()
        return self._counted(finished)

    def _begin(self, parameters: SamplingParameters) -> None:
        if self._table.parameters != parameters:
            self._table = ResponseTable(parameters, self._max_batch)
        if parameters.routed_experts and self._recorder is None:
            self._recorder = RouteRecorder(self._model)

    def _stop_recording(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def _read(self) -> tuple[list[Finished], list[tuple[Tensor, Tensor]]]:
        """Read the token that each response got last.

        Returns the responses whose last token was read for its routes, complete now, and slots [n]
        and logits [n, V] of those that go on, if any.
        """
        slots = self._batch.owners[self._batch.rows]
        if not len(slots):
            return [], []
        if self._read_with != self._weights.version and self._interrupts != "continue":
            # All that was read so far, with the new weights; routes recorded before stay.
            self._batch.clear()
            ones = torch.ones_like(slots)
            logits, places = self._batch.join(self._table.contexts(slots), ones, slots)
            last = torch.stack([mine[-1] for mine in places])
        else:
            last = self._batch.rows
            logits = self._batch.read(self._table.last_tokens(slots))
        if self._recorder is None:
            return [], [(slots, logits)]
        self._table.add_response_routes(slots, self._recorder.take().at(last))
        closing = torch.isin(slots, self._last_read)
        self._batch.leave(slots[closing])
        going_on = (slots[~closing], logits[(~closing).to(logits.device)])
        return self._table.close(slots[closing]), [going_on]

    def _join(self) -> tuple[Tensor, Tensor]:
        """Read the prompts of those that join: their slots [n], logits [n, V]."""
        requests = [request for _, request, _ in self._joining]
        slots = [self._table.open(ticket, request) for ticket, request, _ in self._joining]
        self._joining.clear()
        copies = torch.tensor([len(request.seeds) for request in requests])
        prompts = [request.prompt for request in requests]
        logits, places = self._batch.join(prompts, copies, torch.cat(slots))
        if self._recorder is not None:
            self._table.add_prompt_routes(slots, self._recorder.take(), places)
        return torch.cat(slots), logits

    def _sample(self, slots: Tensor, logits: Tensor) -> list[Finished]:
        """Draw a token for each of `slots` [n] from `logits` [n, V]; those that are complete."""
        rows = max(1, _SAMPLED_AT_ONCE // logits.shape[1]) if logits.is_cpu else len(slots)
        parts = zip(slots.split(rows), logits.split(rows), strict=True)
        tokens, log_probs = map(torch.cat, zip(*(self._draw(*part) for part in parts), strict=True))
        version = self._weights.version
        goes_on = self._table.add_tokens(slots, tokens.cpu(), log_probs.cpu(), version)
        ended = slots[~goes_on]
        # The engine never reads a response's last token, unless its routes are wanted.
        if self._recorder is not None:
            self._last_read = ended
            return []
        self._batch.leave(ended)
        return self._table.close(ended)

    def _draw(self, slots: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [n] of `slots` [n] and their log-probs [n]; records kept and likeliest ids."""
        parameters = self._table.parameters
        distribution = sampling_log_probs(logits, parameters)
        if parameters.sampling_mask:
            self._table.add_kept_ids(slots, kept_ids(distribution))
        if parameters.head:
            self._table.add_head(slots, SamplerHead.of(distribution, parameters.head))
        return draw(distribution, self._table.uniforms(slots).to(self._device))

    def _forward(
        self, tokens: Tensor, positions: Tensor, cache: Any, places: Tensor, **attention: Any
    ) -> Tensor:
        """[B, n, V] after `places` [n] of `tokens` [B, S]; see `DecodeBatch`."""
        mask = attention.pop("attention_mask", None)
        output = self._model(
            input_ids=tokens.to(self._device),
            attention_mask=None if mask is None else mask.to(self._device),
            position_ids=positions.to(self._device),
            past_key_values=cache,
            use_cache=True,
            # As an index, not as the number 1: the slice that a number takes has strides for which
            # `matmul` copies the LM head once per row.
            logits_to_keep=places.to(self._device),
            **attention,
        )
        return output.logits
