"""Groups on their way through one engine: those that wait, those that are played, those done."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from plugin.engines.protocol import GenerationRequest, SamplingParameters
from plugin.environments.trajectory import Trajectory
from plugin.weights.buckets import NO_WEIGHTS


class PlayedGroup(NamedTuple):
    """The trajectories of the request that was begun as `ticket`, one per seed."""

    ticket: int
    trajectories: list[Trajectory]


class Player(Protocol):
    """Turns requests into trajectories, in one turn or several, many at the same time."""

    @property
    def open(self) -> int:
        """Groups that were begun and are not done."""
        ...

    def has_room(self, request: GenerationRequest, parameters: SamplingParameters) -> bool:
        """Whether the engine has room for another group."""
        ...

    def begin(
        self, ticket: int, request: GenerationRequest, parameters: SamplingParameters
    ) -> None:
        """Begin a group."""
        ...

    def step(self) -> list[PlayedGroup]:
        """Get everything open a step further; the groups that are done now."""
        ...

    def abort(self) -> None:
        """Forget what is open."""
        ...


class _Waiting(NamedTuple):
    ticket: int
    request: GenerationRequest
    parameters: SamplingParameters
    at_least: int


class GroupLoop:
    """Begins groups in the order in which they came, as soon as there is room for each.

    version: of the engine's weights; a group waits for those it was sent after
    held: begin no further group
    """

    def __init__(self, player: Player) -> None:
        self._player = player
        self._waiting: deque[_Waiting] = deque()
        self.version, self.held = NO_WEIGHTS, False

    @property
    def open(self) -> int:
        """Groups that were begun and are not done."""
        return self._player.open

    @property
    def is_idle(self) -> bool:
        """Whether every group is done."""
        return not (self._waiting or self._player.open)

    @property
    def can_step(self) -> bool:
        """Whether a step would do anything."""
        return self._player.open > 0 or self._next_may_begin()

    def add(
        self,
        tickets: Sequence[int],
        requests: Sequence[GenerationRequest],
        parameters: SamplingParameters,
        at_least: int = NO_WEIGHTS,
    ) -> None:
        """Take groups; no token of them is sampled with weights older than `at_least`."""
        for ticket, request in zip(tickets, requests, strict=True):
            self._waiting.append(_Waiting(ticket, request, parameters, at_least))

    def step(self) -> list[PlayedGroup]:
        """Begin what may begin, and go one step; the groups that are done now."""
        while self._next_may_begin():
            ticket, request, parameters, _ = self._waiting.popleft()
            self._player.begin(ticket, request, parameters)
        return self._player.step() if self._player.open else []

    def abort(self) -> None:
        """Forget every group."""
        self._waiting.clear()
        self._player.abort()

    def _next_may_begin(self) -> bool:
        if self.held or not self._waiting:
            return False
        _, request, parameters, at_least = self._waiting[0]
        return self.version >= at_least and self._player.has_room(request, parameters)


def play_all(
    player: Player, requests: Sequence[GenerationRequest], parameters: SamplingParameters
) -> list[list[Trajectory]]:
    """The trajectories of every request, in order, once all are done."""
    loop, done = GroupLoop(player), dict[int, list[Trajectory]]()
    loop.add(range(len(requests)), requests, parameters)
    try:
        while not loop.is_idle:
            done.update(loop.step())
    except BaseException:
        loop.abort()
        raise
    return [done[number] for number in range(len(requests))]
