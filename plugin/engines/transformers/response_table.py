"""Responses while they grow: one slot each, whatever their place in the batch, with the routes that
their tokens took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plugin.batch_types import SamplerHead, route_dtype
from plugin.engines.protocol import (
    Finished,
    FinishReason,
    Generation,
    GenerationRequest,
    SamplingParameters,
)
from plugin.engines.transformers.sampling import uniform_rows
from plugin.errors import EngineError
from plugin.ragged import Ragged


class RecordedRoutes(NamedTuple):
    """Experts and float32 weights, both [tokens, moe_layers, topk]."""

    experts: Tensor
    weights: Tensor

    def at(self, places: Tensor | slice) -> RecordedRoutes:
        """Those of some tokens [n]."""
        return RecordedRoutes(self.experts[places], self.weights[places])


class RouteRecorder:
    """Hooks the routers of a transformers MoE model, in layer order.

    Each forward pass of [B, S] tokens leaves two [B * S, topk] tensors per router; `take` joins
    those of all passes since the last call.
    """

    def __init__(self, model: nn.Module) -> None:
        routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
        if not routers:
            raise EngineError(
                f"{type(model).__name__} has no MoE router to record; drop "
                "--use-rollout-routing-replay"
            )
        self._dtype = route_dtype(int(routers[0].num_experts))  # type: ignore[arg-type]
        self._passes: list[list[RecordedRoutes]] = [[] for _ in routers]
        self._handles = [
            router.register_forward_hook(self._hook(number))
            for number, router in enumerate(routers)
        ]

    def _hook(self, number: int) -> Any:
        def record(_module: nn.Module, _inputs: Any, output: tuple[Tensor, ...]) -> None:
            # logits, weights of the chosen experts as they are mixed, chosen experts
            _, weights, experts = output
            self._passes[number].append(
                RecordedRoutes(
                    experts.detach().to("cpu", self._dtype),
                    weights.detach().to("cpu", torch.float32),
                )
            )

        return record

    def take(self) -> RecordedRoutes:
        """[tokens, moe_layers, topk] routes of the forward passes since the last call."""
        missing = [number for number, passes in enumerate(self._passes) if not passes]
        if missing:
            raise EngineError(f"router {missing[0]} did not run in the last forward pass")
        by_layer = [
            RecordedRoutes(*map(torch.cat, zip(*passes, strict=True))) for passes in self._passes
        ]
        self._passes = [[] for _ in self._passes]
        return RecordedRoutes(*(torch.stack(parts, dim=1) for parts in zip(*by_layer, strict=True)))

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()


@dataclass
class _Owner:
    """Whose response is in a slot, and what is recorded about it besides its tokens."""

    ticket: int
    place: int
    prompt: tuple[int, ...]
    routes: list[RecordedRoutes] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)


class ResponseTable:
    """Up to `slots` responses under one set of parameters."""

    def __init__(self, parameters: SamplingParameters, slots: int) -> None:
        self.parameters = parameters
        length = parameters.max_response_length
        # Not filled: pages that no response reaches are never touched.
        self._uniforms = torch.empty(slots, length, dtype=torch.float64)
        self._tokens = torch.empty(slots, length, dtype=torch.int64)
        self._log_probs = torch.empty(slots, length)
        self._versions = torch.empty(slots, length, dtype=torch.int64)
        self._head = SamplerHead(
            torch.empty(slots, length, parameters.head, dtype=torch.int32),
            torch.empty(slots, length, parameters.head),
        )
        self._lengths = torch.zeros(slots, dtype=torch.int64)
        self._stopped = torch.zeros(slots, dtype=torch.bool)
        self._stop_tokens = torch.tensor(parameters.stop_token_ids, dtype=torch.int64)
        self._owners: dict[int, _Owner] = {}
        self._free = list(range(slots))[::-1]

    def __len__(self) -> int:
        return len(self._owners)

    def open(self, ticket: int, request: GenerationRequest) -> Tensor:
        """[n] a slot for each seed of the request."""
        slots = [self._free.pop() for _ in request.seeds]
        for place, slot in enumerate(slots):
            self._owners[slot] = _Owner(ticket, place, request.prompt)
        opened = torch.tensor(slots)
        self._uniforms[opened] = uniform_rows(request.seeds, self._uniforms.shape[1])
        self._lengths[opened] = 0
        return opened

    def uniforms(self, slots: Tensor) -> Tensor:
        """[len(slots)] random numbers of the next position."""
        return self._uniforms[slots, self._lengths[slots]]

    def last_tokens(self, slots: Tensor) -> Tensor:
        """[len(slots)] the tokens sampled last."""
        return self._tokens[slots, self._lengths[slots] - 1]

    def contexts(self, slots: Tensor) -> list[tuple[int, ...]]:
        """Prompt and response so far of each of `slots`."""
        return [
            (*self._owners[slot].prompt, *self._tokens[slot, :length].tolist())
            for slot, length in zip(slots.tolist(), self._lengths[slots].tolist(), strict=True)
        ]

    def add_tokens(
        self, slots: Tensor, tokens: Tensor, log_probs: Tensor, weight_version: int
    ) -> Tensor:
        """Append one token to each of `slots`; returns which of them go on."""
        position = self._lengths[slots]
        self._tokens[slots, position] = tokens
        self._log_probs[slots, position] = log_probs
        self._versions[slots, position] = weight_version
        self._lengths[slots] += 1
        stopped = torch.isin(tokens, self._stop_tokens)
        self._stopped[slots] = stopped
        return ~stopped & (self._lengths[slots] < self.parameters.max_response_length)

    def add_prompt_routes(
        self, slots: Sequence[Tensor], routes: RecordedRoutes, places: Sequence[Tensor]
    ) -> None:
        """`routes` of prompts whose slots are `slots`, and which tokens are each prompt's."""
        for mine, own in zip(slots, places, strict=True):
            for slot in mine.tolist():
                self._owners[slot].routes.append(routes.at(own))

    def add_response_routes(self, slots: Tensor, routes: RecordedRoutes) -> None:
        """`routes` [len(slots), layers, topk] of the tokens just read."""
        for number, slot in enumerate(slots.tolist()):
            self._owners[slot].routes.append(routes.at(slice(number, number + 1)))

    def add_kept_ids(self, slots: Tensor, kept: Sequence[Tensor]) -> None:
        """One entry of ids for each of `slots`, of the tokens about to be added."""
        for slot, ids in zip(slots.tolist(), kept, strict=True):
            self._owners[slot].kept.append(ids)

    def add_head(self, slots: Tensor, head: SamplerHead) -> None:
        """The likeliest ids of the tokens about to be added to `slots`."""
        for column, values in zip(self._head, head, strict=True):
            column[slots, self._lengths[slots]] = values.to(column)

    def close(self, slots: Tensor) -> list[Finished]:
        """The finished responses in `slots`, which are free again."""
        if not len(slots):
            return []
        lengths = self._lengths[slots]
        longest = int(lengths.max())
        # One copy for all: a slot is written to again.
        tables = (self._tokens, self._versions, self._log_probs, *self._head)
        columns = [column[slots, :longest] for column in tables]
        rows = zip(
            slots.tolist(),
            lengths.tolist(),
            self._stopped[slots].tolist(),
            *(column.unbind() for column in columns),
            strict=True,
        )
        return [self._closed(*row) for row in rows]

    def _closed(
        self,
        slot: int,
        length: int,
        stopped: bool,
        tokens: Tensor,
        versions: Tensor,
        log_probs: Tensor,
        *head: Tensor,
    ) -> Finished:
        owner = self._owners.pop(slot)
        self._free.append(slot)
        parameters, experts, weights = self.parameters, None, None
        if parameters.routed_experts:
            experts, weights = map(torch.cat, zip(*owner.routes, strict=True))
        reason: FinishReason = "stop" if stopped else "length"
        generation = Generation(
            tokens=tokens[:length],
            finish_reason=reason,
            weight_version=versions[:length],
            log_probs=log_probs[:length] if parameters.log_probs else None,
            routed_experts=experts,
            routed_weights=weights if parameters.routed_weights else None,
            sampling_mask=Ragged.of(owner.kept) if parameters.sampling_mask else None,
            head=SamplerHead(*head).first(length) if parameters.head else None,
        )
        return Finished(owner.ticket, owner.place, generation)
