"""Requests in, responses out, one decode step at a time, over any engine.

Engines that batch continuously are fed as room gets free. One that only has a blocking `generate`
is given as much as fits, and nothing more until all of it is answered.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from plugin.engines.protocol import (
    Answer,
    EngineHealth,
    Finished,
    Generation,
    GenerationRequest,
    RolloutEngine,
    SamplingParameters,
    SteppingEngine,
    check_answer,
    check_generations,
    without_bad_log_probs,
)
from plugin.engines.transformers.weight_loader import WeightLoader
from plugin.weights.buckets import NO_WEIGHTS


@dataclass
class _Part:
    """Seeds of a request that join together; the first of them is seed `start` of the request.

    left: responses that have not finished
    """

    owner: Any
    start: int
    request: GenerationRequest
    parameters: SamplingParameters
    left: int


class ResponseStream:
    """Feeds an engine in the order in which requests come; answers leave as they finish.

    The responses of one request join together, so that their prompt is read once; a request with
    more seeds than fit is split. What is in the batch at any time follows from the order of the
    requests, so equal requests to an idle engine give equal responses to the last digit.

    max_batch: responses at once of an engine without a batch of its own
    lockstep: whether the engine answers everything it was given before it takes more
    """

    def __init__(self, engine: RolloutEngine, max_batch: int) -> None:
        self.lockstep = not _batches_continuously(engine)
        self._engine: SteppingEngine = (
            _Lockstep(engine, max_batch) if self.lockstep else cast(SteppingEngine, engine)
        )
        self.max_batch = self._engine.room
        self._waiting: deque[_Part] = deque()
        self._running: dict[int, _Part] = {}
        self._tickets = itertools.count()
        self._finished = 0

    @property
    def progress(self) -> int:
        """Grows with every token where the engine counts them, else with every response."""
        return int(getattr(self._engine, "progress", 0)) + self._finished

    @property
    def open(self) -> int:
        """Responses that were asked for and have not finished."""
        return self._engine.running + sum(len(part.request.seeds) for part in self._waiting)

    def has_room(self, request: GenerationRequest, parameters: SamplingParameters) -> bool:
        """Whether the request would join the batch at the next step, with all that wait for it."""
        if not self._waiting:
            return self._fits(request, parameters)
        ahead = sum(len(part.request.seeds) for part in self._waiting)
        alike = self._waiting[0].parameters == parameters
        return alike and ahead + len(request.seeds) <= self._engine.room

    def add(self, owner: Any, request: GenerationRequest, parameters: SamplingParameters) -> None:
        """Take a request; `step` returns its responses as those of `owner`, of any type."""
        for start in range(0, len(request.seeds), self.max_batch):
            seeds = request.seeds[start : start + self.max_batch]
            part = GenerationRequest(request.prompt, seeds, request.prompt_index)
            self._waiting.append(_Part(owner, start, part, parameters, len(seeds)))

    def step(self) -> list[Finished]:
        """Let in what fits and go one step; the responses that finished, checked."""
        while self._waiting and self._fits(self._waiting[0].request, self._waiting[0].parameters):
            part, ticket = self._waiting.popleft(), next(self._tickets)
            self._running[ticket] = part
            self._engine.add(ticket, part.request, part.parameters)
        if not self._running:
            return []
        return [self._checked(*finished) for finished in self._engine.step()]

    def abort(self) -> None:
        """Forget everything that was asked for."""
        self._waiting.clear()
        self._running.clear()
        self._engine.abort()

    def _fits(self, request: GenerationRequest, parameters: SamplingParameters) -> bool:
        if not self._running:
            return True
        alike = next(iter(self._running.values())).parameters == parameters
        return alike and min(len(request.seeds), self.max_batch) <= self._engine.room

    def _checked(self, ticket: int, place: int, answer: Answer) -> Finished:
        part = self._running[ticket]
        self._finished += 1
        check_answer(part.request.prompt_index, part.request, answer, part.parameters)
        if part.parameters.drop_bad_log_probs:
            answer = without_bad_log_probs(answer)
        part.left -= 1
        if not part.left:
            del self._running[ticket]
        return Finished(part.owner, part.start + place, answer)


class GeneratesBySteps:
    """Base of the built-in engines, which batch continuously.

    name: of the engine, for errors
    weights: which of them it has
    """

    #: Tokens so far, also of responses under way; stays 0 where servers generate them.
    progress = 0

    def __init__(self, name: str, weights: WeightLoader) -> None:
        self._name, self._weights = name, weights
        self._generated_tokens = 0

    def health(self) -> EngineHealth:
        """Version of the weights and tokens generated so far."""
        return EngineHealth(self._name, self._weights.version, self._generated_tokens)

    def forget_weights(self) -> None:
        """Have no version, so that the newest one can come again."""
        self._weights.version = NO_WEIGHTS

    def generate(
        self, requests: Sequence[GenerationRequest], parameters: SamplingParameters
    ) -> list[list[Answer]]:
        """For each request, one answer per seed, in order."""
        stream = ResponseStream(cast(RolloutEngine, self), 0)
        answers: list[dict[int, Answer]] = [{} for _ in requests]
        for group, request in zip(answers, requests, strict=True):
            stream.add(group, request, parameters)
        try:
            while stream.open:
                for group, place, answer in stream.step():
                    group[place] = answer
        except BaseException:
            stream.abort()
            raise
        return [[group[place] for place in sorted(group)] for group in answers]

    def _counted(self, finished: list[Finished]) -> list[Finished]:
        """`finished`, with its tokens added to those generated."""
        answers = [done.answer for done in finished]
        self._generated_tokens += sum(
            answer.tokens.numel() for answer in answers if isinstance(answer, Generation)
        )
        return finished


class _Lockstep:
    """A `SteppingEngine` over an engine's blocking `generate`."""

    def __init__(self, engine: RolloutEngine, max_batch: int) -> None:
        self._engine, self._max_batch = engine, max_batch
        self._asked: list[tuple[int, GenerationRequest]] = []
        self._parameters = SamplingParameters()

    @property
    def running(self) -> int:
        return sum(len(request.seeds) for _, request in self._asked)

    @property
    def room(self) -> int:
        return self._max_batch - self.running

    def add(self, ticket: int, request: GenerationRequest, parameters: SamplingParameters) -> None:
        self._asked.append((ticket, request))
        self._parameters = parameters

    def step(self) -> list[Finished]:
        asked, self._asked = self._asked, []
        requests = [request for _, request in asked]
        answers = self._engine.generate(requests, self._parameters)
        check_generations(requests, answers, self._parameters)
        return [
            Finished(ticket, place, answer)
            for (ticket, _), group in zip(asked, answers, strict=True)
            for place, answer in enumerate(group)
        ]

    def abort(self) -> None:
        self._asked = []


def _batches_continuously(engine: RolloutEngine) -> bool:
    """Whether `engine` has `step`, unless a subclass overrides only `generate`."""
    for kind in type(engine).__mro__:
        if "step" in vars(kind):
            return True
        if "generate" in vars(kind):
            return False
    return False
