"""The result of one response: one training sample, several, or the reason for none.

Engines build `Trajectory` objects; they travel and are trained on as the columns of `Rollouts`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from plugin.batch_types import RolloutBatch, RolloutSample
from plugin.ragged import Integers, Ragged, as_integers, ragged_range


@dataclass(frozen=True)
class Trajectory:
    """One response, of one turn or several.

    samples: its training samples, none if it failed; reward and group are the driver's to fill in
    reward: what the environment gave; None where the driver's task scores the response
    error: why there is nothing to train on
    turns: how often the policy was asked
    truncated: whether the last reply was cut at --max-response-length
    """

    samples: tuple[RolloutSample, ...]
    reward: float | None = None
    error: str | None = None
    turns: int = 1
    truncated: bool = False


def failed(reason: str) -> Trajectory:
    """A trajectory that cannot be trained on."""
    return Trajectory((), error=reason)


@dataclass(frozen=True)
class Rollouts:
    """Trajectories as columns; those of one prompt are adjacent.

    batch: the training samples of all trajectories, one after the other
    groups: [M] number of the prompt that each trajectory answers
    samples: [M] training samples of each, 0 where it failed
    rewards: [M] float64, NaN where the driver's task scores the response
    errors: [M] str, empty where there is none; turns: [M]; truncated: [M] bool
    """

    batch: RolloutBatch
    groups: Integers
    samples: Integers
    rewards: NDArray[np.float64]
    errors: NDArray[np.str_]
    turns: Integers
    truncated: NDArray[np.bool_]

    @classmethod
    def of(
        cls, answers: Sequence[Sequence[Trajectory]], numbers: Sequence[int] | None = None
    ) -> Rollouts:
        """The trajectories of every prompt; `numbers`: of the prompts, 0 and up if not given."""
        flat = [trajectory for answer in answers for trajectory in answer]
        prompts = np.array(range(len(answers)) if numbers is None else numbers, np.int64)
        return cls(
            RolloutBatch.from_samples([sample for t in flat for sample in t.samples]),
            np.repeat(prompts, [len(answer) for answer in answers]),
            np.array([len(t.samples) for t in flat], np.int64),
            np.array([math.nan if t.reward is None else t.reward for t in flat], np.float64),
            np.array([t.error or "" for t in flat], np.str_),
            np.array([t.turns for t in flat], np.int64),
            np.array([t.truncated for t in flat], np.bool_),
        )

    def __len__(self) -> int:
        return len(self.samples)

    @cached_property
    def sample_starts(self) -> Integers:
        """[M]: the first sample of each trajectory."""
        return np.cumsum(self.samples) - self.samples

    def per_trajectory(self, column: Ragged) -> Ragged:
        """A per-token column of the samples as one sequence per trajectory."""
        ends = np.cumsum([0, *column.lengths])[np.append(self.sample_starts, len(column))]
        return Ragged(column.values, np.diff(ends))

    @cached_property
    def oldest_version(self) -> Integers:
        """[M]: the oldest weights that sampled an unmasked token; the newest int where none did."""
        return self._versions(np.minimum, np.iinfo(np.int64).max)

    @cached_property
    def newest_version(self) -> Integers:
        """[M]: the newest weights that sampled an unmasked token; -1 where none did."""
        return self._versions(np.maximum, -1)

    def _versions(self, function: np.ufunc, none: int) -> Integers:
        """[M] int64: `function` over the versions of a trajectory's unmasked tokens, or `none`."""
        versions: Ragged = self.batch.columns["weight_versions"]
        masked = self.batch.columns["loss_masks"].values == 0
        counted = versions.like(versions.values.long().masked_fill(masked, none))
        return self.per_trajectory(counted).reduced(function, none)

    def token_versions(self) -> Integers:
        """[T]: weight version of every unmasked token."""
        versions: Ragged = self.batch.columns["weight_versions"]
        counts = self.batch.columns["loss_masks"].values != 0
        return versions.values[counts].numpy().astype(np.int64, copy=False)

    def response(self, trajectory: int) -> Integers:
        """The token ids of a trajectory's last response, a view."""
        end, length = self._last_responses
        return self._tokens[end[trajectory] - length[trajectory] : end[trajectory]]

    @cached_property
    def _tokens(self) -> Integers:
        return self.batch.columns["unconcat_tokens"].values.numpy()

    @cached_property
    def _last_responses(self) -> tuple[list[int], list[int]]:
        """Of every trajectory: where its last response ends in `_tokens`, and how long it is."""
        last = self.sample_starts + self.samples - 1
        ends = np.cumsum(as_integers(self.batch.columns["total_lengths"]))
        lengths = as_integers(self.batch.columns["response_lengths"])
        return ends[last].tolist(), lengths[last].tolist()

    def select(self, trajectories: Integers, groups: Integers) -> Rollouts:
        """The trajectories at `trajectories` [n], as answers to the prompts `groups` [n]."""
        places = ragged_range(self.sample_starts[trajectories], self.samples[trajectories])
        return Rollouts(
            self.batch.select(places),
            groups,
            self.samples[trajectories],
            self.rewards[trajectories],
            self.errors[trajectories],
            self.turns[trajectories],
            self.truncated[trajectories],
        )

    @staticmethod
    def concatenated(parts: Sequence[Rollouts]) -> Rollouts:
        """Concatenate; prompts keep their numbers."""
        return Rollouts(
            parts[0].batch.concatenated(*(part.batch for part in parts[1:])),
            np.concatenate([part.groups for part in parts]),
            np.concatenate([part.samples for part in parts]),
            np.concatenate([part.rewards for part in parts]),
            np.concatenate([part.errors for part in parts]),
            np.concatenate([part.turns for part in parts]),
            np.concatenate([part.truncated for part in parts]),
        )
