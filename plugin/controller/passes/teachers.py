"""The teachers of a job: which one scores a sample, and what they add to a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from plugin.batch_types import RolloutBatch
from plugin.cluster.trainer_actor import teacher_policy
from plugin.cluster.trainer_group import TrainerGroup
from plugin.config import JobConfig
from plugin.controller.batch import MiniBatch
from plugin.controller.preflight.job_checks import JobParts
from plugin.ragged import Ragged
from plugin.tasks.prompt_format import lookup
from plugin.teachers.http_teacher import HttpTeacher


class Teacher(Protocol):
    """Scores the tokens of a batch."""

    def score(self, batch: RolloutBatch) -> dict[str, Ragged]:
        """The columns that a teacher fills in."""
        ...


class JobTeacher:
    """A teacher on the trainer's ranks."""

    def __init__(self, trainer: TrainerGroup, name: str) -> None:
        self._trainer, self._name = trainer, name

    def score(self, batch: RolloutBatch) -> dict[str, Ragged]:
        return self._trainer.scores(self._name, batch)


class Teachers:
    """All teachers of a job.

    name_of: the teacher of a prompt, by its number; None where there is only one
    """

    def __init__(
        self, teachers: Mapping[str, Teacher], name_of: Callable[[int], str] | None = None
    ) -> None:
        self._teachers, self._name_of = teachers, name_of

    @classmethod
    def of(cls, config: JobConfig, parts: JobParts, trainer: TrainerGroup) -> Teachers:
        """Those that the configuration names; the ranks have built the ones in the job."""
        found: dict[str, Teacher] = {}
        for spec in config.teacher_specs:
            if spec.urls:
                vocabulary = parts.policy.hf_config["vocab_size"]
                found[spec.name] = HttpTeacher.of(config, spec, vocabulary, trainer.while_idle)
            else:
                found[spec.name] = JobTeacher(trainer, teacher_policy(spec.name))
        key, data = config.teacher_key, parts.data
        if key is None or data is None:
            return cls(found)
        return cls(found, lambda number: lookup(data.row(number), key))

    def added_to(
        self, batch: RolloutBatch, updates: Sequence[MiniBatch], prompts: Sequence[int]
    ) -> RolloutBatch:
        """The batch with the columns of the teachers.

        prompts: the numbers of the groups' prompts. Every mini-batch of the first epoch is scored
        by itself, as it is trained on: a teacher with the weights of the policy then differs from
        it in nothing.
        """
        parts = [self._scores(update.of(batch), prompts) for update in updates if not update.epoch]
        for name in parts[0]:
            batch = batch.with_column(name, Ragged.concatenated([part[name] for part in parts]))
        batch.check()
        return batch

    def _scores(self, batch: RolloutBatch, prompts: Sequence[int]) -> dict[str, Ragged]:
        name_of = self._name_of
        if name_of is None:
            [teacher] = self._teachers.values()
            return teacher.score(batch)
        groups: Tensor = batch.columns["group_index"]
        by_group = {number: name_of(prompts[number]) for number in set(groups.tolist())}
        names = np.array([by_group[number] for number in groups.tolist()])
        order, parts = [], []
        for name, teacher in self._teachers.items():
            own = np.flatnonzero(names == name)
            if len(own):
                order.append(own)
                parts.append(teacher.score(batch.select(own)))
        back = np.argsort(np.concatenate(order))
        return {
            column: Ragged.concatenated([part[column] for part in parts]).select(back)
            for column in parts[0]
        }
