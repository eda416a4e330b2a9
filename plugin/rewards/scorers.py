"""Who scores the responses of a job: worker processes, or the task itself on the driver.

A response is submitted to a scorer, which has its score some time later. Its token ids are sent to
the workers as they are: what is done for each of them is done there.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from plugin.config import JobConfig
from plugin.environments.deadline_calls import CallFailure, calls_here
from plugin.errors import BatchError
from plugin.rewards.pool import Pool, PoolScorer, RewardPool, RewardSource
from plugin.rewards.reward_set import Score
from plugin.rewards.text_rewards import PortableTokenizer, TextSource, TokenResponse, ids_of
from plugin.tasks.loading import load_task, load_tokenizer
from plugin.tasks.prompt_data import DatasetTask
from plugin.tasks.protocol import Prompt, Task, as_reward, reward_by

#: Workers of a machine whose number nobody has given.
MOST_WORKERS = 8

#: Token ids, from an engine's answer or as a list.
Ids = Sequence[int] | NDArray[np.integer[Any]]


class Scorer(Protocol):
    """Scores responses; what is submitted is finished some time later, in any order."""

    def submit(self, prompt: Prompt, response: Ids, *, truncated: bool) -> int:
        """A ticket for the score of a response's token ids."""
        ...

    def finished(self, *, wait_seconds: float = 0.0) -> list[tuple[int, Score | CallFailure]]:
        """Tickets and scores since the last call; waits up to `wait_seconds` for the first."""
        ...

    def forget(self) -> None:
        """Drop the responses whose scoring has not started."""
        ...

    def close(self) -> None:
        """End all background work."""
        ...


class DriverScorer:
    """Computes the rewards of a task on this thread, when results are requested.

    A reward that hangs is interrupted after `seconds`, as far as a signal can.
    """

    def __init__(self, task: Task, seconds: float) -> None:
        self._task, self._seconds = task, seconds
        self._tickets = itertools.count()
        self._asked: list[tuple[int, Prompt, list[int]]] = []

    def submit(self, prompt: Prompt, response: Ids, *, truncated: bool) -> int:
        ticket = next(self._tickets)
        self._asked.append((ticket, prompt, np.asarray(response).tolist()))
        return ticket

    def finished(self, *, wait_seconds: float = 0.0) -> list[tuple[int, Score | CallFailure]]:
        asked, self._asked = self._asked, []
        done: list[tuple[int, Score | CallFailure]] = []
        if not asked:
            return done
        with calls_here(self._seconds) as call:
            for ticket, prompt, response in asked:
                try:
                    done.append((ticket, Score(reward_by(call, self._task, prompt, response))))
                except BatchError as error:
                    done.append((ticket, CallFailure(str(error))))
        return done

    def forget(self) -> None:
        self._asked.clear()

    def close(self) -> None:
        pass


class TextScorer(PoolScorer):
    """The rewards of responses as text; the workers turn token ids into it."""

    def __init__(self, task: DatasetTask, pool: Pool) -> None:
        super().__init__(pool)
        self._asks_prompt = task.asks_prompt

    def submit(self, prompt: Prompt, response: Ids, *, truncated: bool) -> int:
        asked = prompt.tokens if self._asks_prompt else ()
        return self.enqueue(TokenResponse(_as_bytes(response), prompt.data, truncated, asked))


class TaskScorer(PoolScorer):
    """The rewards of a task by path, in workers that each have a task of their own."""

    def submit(self, prompt: Prompt, response: Ids, *, truncated: bool) -> int:
        return self.enqueue((prompt, _as_bytes(response)))


def _as_bytes(response: Ids) -> bytes:
    return np.asarray(response, np.int32).tobytes()


@dataclass(frozen=True)
class TaskSource:
    """How a task is sent to a worker: as its configuration."""

    config: JobConfig

    def load(self) -> TaskRewards:
        return TaskRewards(self.config)

    def timed_out(self, given: Any) -> None:
        """None: the task is the user's own, and may have an answer the next time."""


class TaskRewards:
    """The rewards of a task that was made in this process."""

    def __init__(self, config: JobConfig) -> None:
        self._task: Any = load_task(config, load_tokenizer(config))

    def import_libraries(self) -> None:
        """Do nothing: making the task has imported what it needs."""

    def score(self, given: tuple[Prompt, bytes]) -> Score:
        """The reward of one response; a `BatchError` if it is no finite number."""
        prompt, response = given
        value = self._task.reward(prompt, ids_of(response))
        number = as_reward(value)
        if number is None:
            raise BatchError(f"the task's reward is {value!r}; it must be a finite number")
        return Score(number)


def local_pool(source: RewardSource, config: JobConfig) -> RewardPool:
    """Workers on this machine: --reward-workers, or one per core."""
    given = config.reward_workers
    return RewardPool(
        source,
        workers=min(MOST_WORKERS, os.cpu_count() or 1) if given == "auto" else given,
        seconds=config.reward_timeout,
        memory_mb=config.reward_memory,
    )


def make_scorer(
    config: JobConfig,
    task: Task,
    make_pool: Callable[[RewardSource, JobConfig], Pool] = local_pool,
) -> Scorer:
    """Start what scores: workers for --prompt-data, and for --task-path if their number is given.

    A task of the user's own may keep state between its methods, so it stays in this process unless
    the user says that it need not. The built-in task stays, too: a call to another process takes
    longer than its reward.
    """
    if isinstance(task, DatasetTask):
        tokenizer = PortableTokenizer.of(task.tokenizer)
        source = TextSource(task.rewards, tokenizer, task.stop_token_ids)
        return TextScorer(task, make_pool(source, config))
    if config.reward_workers == "auto" or config.task_path is None:
        return DriverScorer(task, config.reward_timeout)
    return TaskScorer(make_pool(TaskSource(config), config))


def scorer_for(task: Task, scorer: Scorer, config: JobConfig) -> Scorer:
    """A scorer of another task of the job, in the processes of `scorer` where they can serve it."""
    if isinstance(task, DatasetTask) and isinstance(scorer, TextScorer):
        return TextScorer(task, scorer.pool)
    if not isinstance(task, DatasetTask) and isinstance(scorer, TaskScorer):
        return TaskScorer(scorer.pool)
    return DriverScorer(task, config.reward_timeout)
