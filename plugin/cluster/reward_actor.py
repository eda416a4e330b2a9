"""The body of the actor that computes rewards on a node of a cluster.

Code of rewards never runs in the actor itself but in the worker processes of a `RewardPool`, with
the limits and the isolation that they have on the driver's machine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from plugin.environments.deadline_calls import CallFailure
from plugin.rewards.pool import PoolScorer, RewardPool, RewardSource
from plugin.rewards.reward_set import Score

#: Ray's concurrency group of calls that are answered at once.
CONTROL = "control"


class RewardActor:
    """Worker processes on one node; several calls may be made at a time."""

    def __init__(
        self, source: RewardSource, *, workers: int, seconds: float, memory_mb: int
    ) -> None:
        self._pool = RewardPool(source, workers=workers, seconds=seconds, memory_mb=memory_mb)

    def start(self) -> CallFailure | None:
        """Wait until a worker has loaded the rewards; returns why it has not."""
        return self._pool.first_start()

    def ping(self) -> int:
        """The id of this process, at once."""
        return os.getpid()

    def score(self, responses: Sequence[Any]) -> list[Score | CallFailure]:
        """The scores of responses, in order."""
        scorer = PoolScorer(self._pool)
        places = {scorer.enqueue(given): place for place, given in enumerate(responses)}
        scores: list[Any] = [None] * len(responses)
        while places:
            for ticket, score in scorer.finished(wait_seconds=60.0):
                scores[places.pop(ticket)] = score
        return scores

    def close(self) -> None:
        """End the workers and remove the directories of their programs."""
        self._pool.close()
