"""Groups of responses on their way from the task through the engines to the trainer.

A group is one prompt with all its responses. Groups are sent in chunks, at most two chunks wait at an engine,
and how many groups may be under way is bounded so that none can be older than allowed when its turn comes.
Those that are nevertheless (an engine that fell behind) are dropped and counted.
"""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from plugin.batch_types import RolloutSample
from plugin.config import JobConfig
from plugin.errors import EngineError
from plugin.rollout.engine_protocol import (
    Generation,
    GenerationRequest,
    SamplingParameters,
    check_generations,
)
from plugin.rollout.task_protocol import Prompt, Task, checked_prompt, checked_reward

_CHUNKS_PER_ENGINE = 2
_POLL_SECONDS = 5.0


class Engines(Protocol):
    """What the queue needs of the engines, wherever they run; `EnginePool` has it."""

    def __len__(self) -> int: ...

    def send(
        self, engine: int, requests: list[GenerationRequest], parameters: SamplingParameters
    ) -> Any:
        """A ticket for the answer of engine number `engine`."""
        ...

    def finished(self, tickets: list[Any], *, wait_seconds: float) -> list[Any]:
        """The tickets that have an answer, or have failed; waits for the first one at most so long."""
        ...

    def answer(self, ticket: Any) -> list[list[Generation]]:
        """The answer of a finished ticket, or its error."""
        ...


@dataclass(frozen=True)
class Group:
    """A prompt, its number, and its scored responses."""

    index: int
    prompt: Prompt
    generations: list[Generation]
    rewards: list[float]

    @property
    def weight_version(self) -> int:
        """The oldest weights that any of the responses came from."""
        return min(generation.weight_version for generation in self.generations)


@dataclass(frozen=True)
class _Chunk:
    engine: int
    indices: list[int]
    prompts: list[Prompt]
    requests: list[GenerationRequest]
    sent: float


@dataclass
class QueueCounts:
    """Groups issued, trained on and dropped; at any time issued = trained + dropped + under way."""

    issued: int = 0
    taken: int = 0
    dropped_stale: int = 0


@dataclass
class RolloutQueue:
    """Issues prompts, collects groups, hands out batches; single-threaded, driven by the job's loop."""

    task: Task
    engines: Engines
    parameters: SamplingParameters
    config: JobConfig
    counts: QueueCounts = field(default_factory=QueueCounts)
    _ready: deque[Group] = field(default_factory=deque)
    _in_flight: dict[Any, _Chunk] = field(default_factory=dict)
    _batch_is_out: bool = False

    def take(self, version: int) -> list[Group]:
        """The next batch of `rollout_batch_size` groups, oldest prompts first; waits for it.

        version: of the trainer's weights; groups more than the staleness limit behind it are dropped
        """
        self._batch_is_out = False
        wanted = self.config.rollout_batch_size
        self._drop_stale(version)
        while len(self._ready) < wanted:
            self._issue()
            self._collect(wait=True)
            self._drop_stale(version)
        ordered = sorted(self._ready, key=lambda group: group.index)
        self._ready = deque(ordered[wanted:])
        self.counts.taken += wanted
        self._batch_is_out = True
        return ordered[:wanted]

    def pump(self) -> None:
        """Collects what is finished and, in asynchronous mode, issues what may be; never waits."""
        self._collect(wait=False)
        if self.config.async_rollouts:
            self._issue()

    @property
    def under_way(self) -> int:
        """Groups issued and not yet handed out."""
        return len(self._ready) + sum(len(chunk.indices) for chunk in self._in_flight.values())

    def _limit(self) -> int:
        """How many groups may be under way.

        One that has n groups before it is trained on after n // batch further weight versions, plus one if a
        batch is with the trainer now.
        """
        rounds = self.config.staleness_limit + (0 if self._batch_is_out else 1)
        return rounds * self.config.rollout_batch_size

    def _chunk_size(self) -> int:
        fair = -(-self.config.rollout_batch_size // len(self.engines))
        fits = max(1, self.config.rollout_max_batch // self.config.n_samples_per_prompt)
        return min(fair, fits)

    def _issue(self) -> None:
        while self.under_way < self._limit():
            busy = [chunk.engine for chunk in self._in_flight.values()]
            engine = min(range(len(self.engines)), key=busy.count)
            if busy.count(engine) >= _CHUNKS_PER_ENGINE:
                return
            self._send_chunk(engine, min(self._chunk_size(), self._limit() - self.under_way))

    def _send_chunk(self, engine: int, size: int) -> None:
        indices = list(range(self.counts.issued, self.counts.issued + size))
        longest = self.config.max_prompt_length
        prompts = [checked_prompt(self.task, index, longest) for index in indices]
        requests = [
            GenerationRequest(prompt.tokens, self._seeds(index))
            for index, prompt in zip(indices, prompts, strict=True)
        ]
        ticket = self.engines.send(engine, requests, self.parameters)
        self._in_flight[ticket] = _Chunk(engine, indices, prompts, requests, time.monotonic())
        self.counts.issued += size

    def _seeds(self, index: int) -> tuple[int, ...]:
        draw = random.Random(f"{self.config.seed}/{index}")
        return tuple(draw.getrandbits(62) for _ in range(self.config.n_samples_per_prompt))

    def _collect(self, *, wait: bool) -> None:
        if not self._in_flight:
            return
        tickets = list(self._in_flight)
        for ticket in self.engines.finished(tickets, wait_seconds=_POLL_SECONDS if wait else 0):
            chunk = self._in_flight.pop(ticket)
            self._accept(chunk, self.engines.answer(ticket))
        self._check_deadlines()

    def _accept(self, chunk: _Chunk, answers: list[list[Generation]]) -> None:
        check_generations(chunk.requests, answers, self.parameters)
        for index, prompt, generations in zip(chunk.indices, chunk.prompts, answers, strict=True):
            rewards = [checked_reward(self.task, prompt, g.tokens.tolist()) for g in generations]
            self._ready.append(Group(index, prompt, generations, rewards))

    def _check_deadlines(self) -> None:
        limit = self.config.step_timeout
        for chunk in self._in_flight.values():
            if time.monotonic() - chunk.sent > limit * _CHUNKS_PER_ENGINE:
                raise EngineError(
                    f"engine {chunk.engine} did not answer within {limit * _CHUNKS_PER_ENGINE:g} s; look for a hang "
                    "there, or raise --step-timeout"
                )

    def _drop_stale(self, version: int) -> None:
        oldest = version - self.config.staleness_limit
        kept = [group for group in self._ready if group.weight_version >= oldest]
        self.counts.dropped_stale += len(self._ready) - len(kept)
        self._ready = deque(kept)


def samples_of(groups: list[Group]) -> list[RolloutSample]:
    """One training sample per response; groups are numbered from 0 within the batch."""
    return [
        RolloutSample(
            tokens=torch.cat([torch.tensor(group.prompt.tokens), generation.tokens]),
            response_length=generation.tokens.numel(),
            loss_mask=torch.ones(generation.tokens.numel(), dtype=torch.int64),
            reward=reward,
            group_index=number,
            weight_version=generation.weight_version,
            rollout_log_probs=generation.log_probs,
            routed_experts=generation.routed_experts,
            metadata={"prompt_index": group.index, "finish_reason": generation.finish_reason},
        )
        for number, group in enumerate(groups)
        for generation, reward in zip(group.generations, group.rewards, strict=True)
    ]
