"""Which actors have stopped reacting, while a long call of theirs is under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any, Generic, TypeVar

Who = TypeVar("Who")

_PERIOD_SECONDS = 1.0
#: Longer than a process on a busy machine stays without its turn.
SILENCE_SECONDS = 30.0


class Pulse(Generic[Who]):
    """Asks actors for a sign of life every second, in a thread that no other call of theirs holds.

    A process that is stopped, or whose machine is, fails no call: Ray would wait for it for ever.
    """

    def __init__(self, ask: Callable[[Who], Any]) -> None:
        self._ask = ask
        self._asked: dict[Who, tuple[Any, float]] = {}
        self._checked = 0.0

    def silent(self, actors: Collection[Who]) -> list[Who]:
        """Those of `actors` that have left a question unanswered for too long; never waits."""
        import ray

        now = time.monotonic()
        if now - self._checked < min(_PERIOD_SECONDS, SILENCE_SECONDS):
            return []
        self._checked = now
        calls = {call: who for who, (call, _) in self._asked.items()}
        if calls:
            done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
            for call in done:
                del self._asked[calls[call]]
        for who in actors:
            if who not in self._asked:
                self._asked[who] = (self._ask(who), now)
        return [who for who in actors if now - self._asked[who][1] > SILENCE_SECONDS]
