"""Groups: a prompt's responses, as they are sampled, scored and joined to a batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from plugin.environments.deadline_calls import CallFailure
from plugin.environments.trajectory import Rollouts
from plugin.ragged import ragged_range
from plugin.rewards.scorers import Scorer
from plugin.tasks.protocol import Prompt


@dataclass(frozen=True, order=True)
class Attempt:
    """One attempt to sample a prompt's group.

    index: the prompt's number, by which the queue, the pool and the engines know the group
    failures: of the attempts before this one
    prompt, sent_with: set when it is sent; the attempts that went to the engine together
    """

    index: int
    failures: int = 0
    prompt: Prompt | None = field(default=None, compare=False, repr=False)
    sent_with: Sequence[Attempt] = field(default=(), compare=False, repr=False)


@dataclass(eq=False)
class Group:
    """The responses of an attempt: trajectories `place` of `rollouts`.

    rollouts: what came from an engine at the same time, shared by the groups in it
    parts: [n] float64 of every reward before its weight, by name; empty where there is only one
        number, the task's or the environment's
    unscored: responses that wait for their rewards
    errors: why responses have no reward
    """

    attempt: Attempt
    rollouts: Rollouts
    place: slice
    parts: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    unscored: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def index(self) -> int:
        """The number of the prompt."""
        return self.attempt.index

    @property
    def rewards(self) -> NDArray[np.float64]:
        """[n] float64."""
        return self.rollouts.rewards[self.place]

    @property
    def truncated(self) -> NDArray[np.bool_]:
        """[n] whether the responses were cut off."""
        return self.rollouts.truncated[self.place]

    @property
    def weight_version(self) -> int:
        """Minimum over responses of their oldest weight version."""
        return int(self.rollouts.oldest_version[self.place].min())

    @property
    def last_version(self) -> int:
        """The newest weights that sampled one of its tokens; -1 if all are masked."""
        return int(self.rollouts.newest_version[self.place].max())

    @property
    def newest_version(self) -> int:
        """Minimum over responses of their newest weight version."""
        return int(self.rollouts.newest_version[self.place].min())


class GroupScoring:
    """Hands the responses of groups to a scorer, while others are still generated."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._open: dict[int, tuple[Group, int]] = {}  # scorer's ticket -> group, trajectory
        self._groups: dict[int, Group] = {}

    @property
    def groups(self) -> list[Group]:
        """Those that are being scored."""
        return list(self._groups.values())

    @property
    def attempts(self) -> list[Attempt]:
        """Of the groups that are being scored."""
        return [group.attempt for group in self._groups.values()]

    def __len__(self) -> int:
        """How many groups are being scored."""
        return len(self._groups)

    def begin(self, group: Group) -> bool:
        """Submit the responses without a reward; returns whether there are any."""
        rollouts, prompt = group.rollouts, group.attempt.prompt
        assert prompt is not None
        for i in range(group.place.start, group.place.stop):
            if np.isnan(rollouts.rewards[i]):
                cut = bool(rollouts.truncated[i])
                ticket = self._scorer.submit(prompt, rollouts.response(i), truncated=cut)
                self._open[ticket] = group, i
                group.unscored += 1
        if group.unscored:
            self._groups[group.index] = group
        return group.unscored > 0

    def finished(self, wait_seconds: float) -> list[Group]:
        """Groups whose last response was scored, or failed, since the last call."""
        done: list[Group] = []
        for ticket, score in self._scorer.finished(wait_seconds=wait_seconds):
            if ticket not in self._open:  # from before a restart
                continue
            group, i = self._open.pop(ticket)
            group.unscored -= 1
            if isinstance(score, CallFailure):
                group.errors.append(score.reason)
            else:
                group.rollouts.rewards[i] = score.total
                for name, value in score.parts.items():
                    part = group.parts.setdefault(name, np.full(len(group.rewards), np.nan))
                    part[i - group.place.start] = value
            if not group.unscored:
                del self._groups[group.index]
                done.append(group)
        return done

    def withdraw(self, attempts: Collection[Attempt]) -> None:
        """Forget the groups of these attempts."""
        self._open = {
            ticket: (group, i)
            for ticket, (group, i) in self._open.items()
            if group.attempt not in attempts
        }
        for attempt in attempts:
            self._groups.pop(attempt.index, None)

    def clear(self) -> None:
        """Forget every group."""
        self._open.clear()
        self._groups.clear()
        self._scorer.forget()


def reward_parts(groups: Sequence[Group]) -> dict[str, NDArray[np.float64]]:
    """[M] of every reward before its weight, in the order of `joined`; empty where one has none."""
    names = groups[0].parts if all(group.parts for group in groups) else ()
    return {name: np.concatenate([group.parts[name] for group in groups]) for name in names}


def joined(groups: Sequence[Group]) -> Rollouts:
    """The rollouts of all groups, numbered from 0 in their order."""
    answers = {id(group.rollouts): group.rollouts for group in groups}
    firsts = dict(zip(answers, np.cumsum([0, *map(len, answers.values())]), strict=False))
    starts = np.array([firsts[id(group.rollouts)] + group.place.start for group in groups])
    counts = np.array([group.place.stop - group.place.start for group in groups])
    everything = Rollouts.concatenated(list(answers.values()))
    return everything.select(
        ragged_range(starts, counts), np.repeat(np.arange(len(groups)), counts)
    )
