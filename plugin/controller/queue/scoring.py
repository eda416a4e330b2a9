"""Who scores the responses of a job: worker processes, or the task itself on the driver."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plugin.config import JobConfig
from plugin.errors import BatchError
from plugin.rewards.pool import RewardPool
from plugin.rewards.reward_set import Score
from plugin.rewards.scorers import DriverScorer, PoolScorer, Scorer, TextScorer
from plugin.tasks.dataset_task import DatasetTask
from plugin.tasks.loading import load_task, load_tokenizer
from plugin.tasks.protocol import Prompt, Task, as_reward

_MOST_WORKERS = 8


def make_scorer(config: JobConfig, task: Task) -> Scorer:
    """Start what scores: workers for --prompt-data, and for --task-path if their number is given.

    A task of the user's own may keep state between its methods, so it stays in this process unless
    the user says that it need not.
    """
    given = config.reward_workers
    if isinstance(task, DatasetTask):
        workers = min(_MOST_WORKERS, os.cpu_count() or 1) if given == "auto" else given
        return TextScorer(task, _pool(task.rewards, workers, config))
    if given == "auto" or config.task_path is None:
        return DriverScorer(task, config.reward_timeout)
    return TaskScorer(_pool(TaskSource(config), given, config))


def scorer_for(task: Task, scorer: Scorer, config: JobConfig) -> Scorer:
    """A scorer of another task of the job, in the processes of `scorer` where they can serve it."""
    if isinstance(task, DatasetTask) and isinstance(scorer, TextScorer):
        return TextScorer(task, scorer.pool)
    if not isinstance(task, DatasetTask) and isinstance(scorer, TaskScorer):
        return TaskScorer(scorer.pool)
    return DriverScorer(task, config.reward_timeout)


def _pool(source: Any, workers: int, config: JobConfig) -> RewardPool:
    return RewardPool(
        source, workers=workers, seconds=config.reward_timeout, memory_mb=config.reward_memory
    )


class TaskScorer(PoolScorer):
    """The rewards of a task by path, in workers that each have a task of their own."""

    def submit(self, prompt: Prompt, response: Sequence[int], *, truncated: bool) -> int:
        return self._mail.submit((prompt, list(response)))


@dataclass(frozen=True)
class TaskSource:
    """A task as a worker is sent it: by its configuration."""

    config: JobConfig

    def load(self) -> TaskRewards:
        return TaskRewards(self.config)


class TaskRewards:
    """The rewards of a task that was made in this process."""

    def __init__(self, config: JobConfig) -> None:
        self._task: Any = load_task(config, load_tokenizer(config))

    def import_libraries(self) -> None:
        """The task has been made, and whatever it needs is there."""

    def score(self, given: tuple[Prompt, list[int]]) -> Score:
        """The reward of one response; a `BatchError` if it is no finite number."""
        value = self._task.reward(*given)
        number = as_reward(value)
        if number is None:
            raise BatchError(f"the task's reward is {value!r}; it must be a finite number")
        return Score(number)
