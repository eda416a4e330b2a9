"""Groups that engines have: which engine, since when, and what was sent together with what."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from plugin.controller.queue.groups import Try
from plugin.engines.protocol import GenerationRequest, SamplingParameters
from plugin.environments.trajectory import Rollouts
from plugin.tasks.protocol import Prompt


class Arrival(NamedTuple):
    """Groups that came back from an engine: prompt i of `rollouts` belongs to `tickets[i]`.

    rollouts: None if the engine was lost with them and has been replaced
    """

    tickets: Sequence[int]
    rollouts: Rollouts | None


class Engines(Protocol):
    """What the queue needs of the engines, wherever they run; see `EnginePool`, which has it."""

    def __len__(self) -> int: ...
    def available(self) -> list[int]: ...
    def send(
        self, engine: int, requests: list[GenerationRequest], parameters: SamplingParameters
    ) -> list[int]: ...
    def receive(self, *, wait_seconds: float) -> list[Arrival]: ...
    def replace(self, engine: int, reason: str) -> None: ...


class SentGroup(NamedTuple):
    """A group that an engine has; those of one `shipment` were sent together."""

    engine: int
    shipment: int
    one_try: Try
    prompt: Prompt
    time: float


class GroupsInFlight:
    """By ticket, those that were sent and have not come back.

    patience: seconds without an answer after which an engine counts as hung
    """

    def __init__(self, engines: Engines, patience: float) -> None:
        self._engines, self._patience = engines, patience
        self._groups: dict[int, SentGroup] = {}
        self._answered: dict[int, list[Try]] = {}  # of shipments that are not answered in full
        self._shipments = 0
        self._last_answer: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[int]:
        return iter(self._groups)

    @property
    def tries(self) -> list[Try]:
        """Of all groups."""
        return [group.one_try for group in self._groups.values()]

    def loads(self) -> Counter[int]:
        """How many groups each engine has."""
        return Counter(group.engine for group in self._groups.values())

    def send(
        self,
        engine: int,
        groups: Sequence[tuple[Try, Prompt]],
        requests: list[GenerationRequest],
        parameters: SamplingParameters,
    ) -> None:
        """Send groups together."""
        self._shipments += 1
        self._answered[self._shipments] = []
        now = time.monotonic()
        tickets = self._engines.send(engine, requests, parameters)
        for ticket, (one_try, prompt) in zip(tickets, groups, strict=True):
            self._groups[ticket] = SentGroup(engine, self._shipments, one_try, prompt, now)

    def receive(
        self, *, wait_seconds: float
    ) -> Iterator[tuple[list[SentGroup | None], Rollouts | None]]:
        """Groups with what came back of them; None in place of one from before a restart."""
        for tickets, rollouts in self._engines.receive(wait_seconds=wait_seconds):
            groups = [self._groups.pop(ticket, None) for ticket in tickets]
            for engine in {group.engine for group in groups if group is not None}:
                self._last_answer[engine] = time.monotonic()
            yield groups, rollouts
            open_shipments = {group.shipment for group in self._groups.values()}
            self._answered = {n: t for n, t in self._answered.items() if n in open_shipments}

    def note_answer(self, group: SentGroup) -> None:
        """Remember that a group came back whole, while others of its shipment are out."""
        self._answered[group.shipment].append(group.one_try)

    def forget_answer(self, one_try: Try) -> None:
        """Take back `note_answer`: the group is sampled anew."""
        for tries in self._answered.values():
            if one_try in tries:
                tries.remove(one_try)

    def answered_with(self, lost: Sequence[SentGroup]) -> list[Try]:
        """What came back of the shipments that `lost` belong to."""
        shipments = sorted({group.shipment for group in lost})
        return [one_try for number in shipments for one_try in self._answered[number]]

    def replace_hung_engines(self) -> list[SentGroup]:
        """Replace engines that are silent for too long; returns what they had."""
        lost: list[SentGroup] = []
        for engine in self.loads():
            mine = {t: group for t, group in self._groups.items() if group.engine == engine}
            # One that answers is alive, however long a response takes.
            sent = min(group.time for group in mine.values())
            began = max(sent, self._last_answer.get(engine, 0.0))
            if time.monotonic() - began > self._patience:
                for ticket in mine:
                    del self._groups[ticket]
                lost += mine.values()
                self._engines.replace(engine, f"did not answer within {self._patience:g} s")
        return lost

    def clear(self) -> None:
        """Forget every group."""
        self._groups.clear()
        self._answered.clear()
