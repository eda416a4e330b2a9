"""Groups: a prompt's scored responses, as the engines sent them and as a batch takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from plugin.environments.trajectory import Rollouts
from plugin.ragged import ragged_range


@dataclass(frozen=True, order=True)
class Try:
    """A prompt's number and how often its group has failed before."""

    index: int
    failures: int = 0


@dataclass(frozen=True)
class Group:
    """The number of a prompt, and its scored responses: trajectories `place` of `rollouts`.

    rollouts: what came from an engine at the same time, shared by the groups in it
    parts: [n] float64 of every reward before its weight, by name; empty where there is only one
        number, the task's or the environment's
    """

    index: int
    rollouts: Rollouts
    place: slice
    parts: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)

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
        """The oldest weights that any of the responses came from."""
        return int(self.rollouts.oldest_version[self.place].min())

    @property
    def newest_of_each(self) -> int:
        """The weights of which every response has a token, or a newer one."""
        return int(self.rollouts.newest_version[self.place].min())


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
