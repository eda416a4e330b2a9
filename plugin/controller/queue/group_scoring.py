"""Groups whose responses are being scored, while others are still generated."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from plugin.controller.queue.groups import Group, Try
from plugin.environments.deadline_calls import CallFailure
from plugin.environments.trajectory import Rollouts
from plugin.rewards.reward_set import Score
from plugin.rewards.scorers import Scorer
from plugin.tasks.protocol import Prompt


class Scored(NamedTuple):
    """A group with its rewards, or why it has none."""

    one_try: Try
    group: Group
    failures: list[str]


@dataclass
class _Open:
    """A group while it is scored; `waiting` maps the scorer's tickets to trajectories."""

    one_try: Try
    rollouts: Rollouts
    place: slice
    waiting: dict[int, int] = field(default_factory=dict)
    scores: dict[int, Score] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def result(self) -> Scored:
        names = next(iter(self.scores.values())).parts if self.scores else ()
        places = range(self.place.start, self.place.stop)
        parts = {
            name: np.array([self.scores[i].parts[name] for i in places], np.float64)
            for name in (() if self.failures else names)
        }
        group = Group(self.one_try.index, self.rollouts, self.place, parts)
        return Scored(self.one_try, group, self.failures)


class GroupScoring:
    """Hands responses to a scorer and puts the groups together again."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._by_ticket: dict[int, _Open] = {}

    @property
    def tries(self) -> list[Try]:
        """Of the groups that are being scored."""
        return list({o.one_try.index: o.one_try for o in self._by_ticket.values()}.values())

    def __bool__(self) -> bool:
        return bool(self._by_ticket)

    def begin(self, one_try: Try, prompt: Prompt, rollouts: Rollouts, place: slice) -> Group | None:
        """Score the responses that carry no reward yet; the group, if none of them does.

        rollouts: its `rewards` are filled in
        """
        scored = _Open(one_try, rollouts, place)
        for i in range(place.start, place.stop):
            if np.isnan(rollouts.rewards[i]):
                cut = bool(rollouts.truncated[i])
                ticket = self._scorer.submit(prompt, rollouts.response(i), truncated=cut)
                scored.waiting[ticket] = i
                self._by_ticket[ticket] = scored
        return None if scored.waiting else scored.result().group

    def finished(self, wait_seconds: float) -> list[Scored]:
        """The groups of which every response has been scored since the last call."""
        done: list[Scored] = []
        for ticket, score in self._scorer.finished(wait_seconds=wait_seconds):
            scored = self._by_ticket.pop(ticket, None)
            if scored is None:  # of before a restart
                continue
            i = scored.waiting.pop(ticket)
            if isinstance(score, CallFailure):
                scored.failures.append(score.reason)
            else:
                scored.rollouts.rewards[i] = score.total
                scored.scores[i] = score
            if not scored.waiting:
                done.append(scored.result())
        return done

    def withdraw(self, indices: Collection[int]) -> None:
        """Forget the groups of these prompts."""
        self._by_ticket = {
            ticket: scored
            for ticket, scored in self._by_ticket.items()
            if scored.one_try.index not in indices
        }

    def clear(self) -> None:
        """Forget every group."""
        self._by_ticket.clear()
        self._scorer.forget()
