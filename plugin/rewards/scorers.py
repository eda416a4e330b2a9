"""Scorers: responses are submitted to them, and their scores are found some time later."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

from plugin.environments.deadline_calls import CallFailure, calls_here
from plugin.errors import BatchError
from plugin.rewards.pool import RewardPool
from plugin.rewards.reward_set import Score, reward_input
from plugin.tasks.dataset_task import DatasetTask
from plugin.tasks.protocol import Prompt, Task, reward_by


class Scorer(Protocol):
    """Scores responses; what is submitted is finished some time later, in any order."""

    def submit(self, prompt: Prompt, response: Sequence[int], *, truncated: bool) -> int:
        """A ticket for the score of a response's token ids."""
        ...

    def finished(self, *, wait_seconds: float = 0.0) -> list[tuple[int, Score | CallFailure]]:
        """Tickets and scores since the last call; may wait for the first."""
        ...

    def forget(self) -> None:
        """Drop what has not been begun with."""
        ...

    def close(self) -> None:
        """End whatever works in the background."""
        ...


class DriverScorer:
    """The rewards of a task on this thread, when they are asked for.

    A reward that hangs is interrupted after `seconds`, as far as a signal can.
    """

    def __init__(self, task: Task, seconds: float) -> None:
        self._task, self._seconds = task, seconds
        self._tickets = itertools.count()
        self._asked: list[tuple[int, Prompt, Sequence[int]]] = []

    def submit(self, prompt: Prompt, response: Sequence[int], *, truncated: bool) -> int:
        ticket = next(self._tickets)
        self._asked.append((ticket, prompt, response))
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


class PoolScorer:
    """Scores in worker processes; several may share a pool, and whoever has made it closes it."""

    def __init__(self, pool: RewardPool) -> None:
        self.pool, self._mail = pool, pool.mailbox()

    def finished(self, *, wait_seconds: float = 0.0) -> list[tuple[int, Score | CallFailure]]:
        return self._mail.finished(wait_seconds=wait_seconds)

    def forget(self) -> None:
        self._mail.forget()

    def close(self) -> None:
        self.pool.close()


class TextScorer(PoolScorer):
    """The rewards of responses as text; `task` turns token ids into it."""

    def __init__(self, task: DatasetTask, pool: RewardPool) -> None:
        super().__init__(pool)
        self._task = task

    def submit(self, prompt: Prompt, response: Sequence[int], *, truncated: bool) -> int:
        task = self._task
        try:
            given = reward_input(
                task, prompt, response, truncated=truncated, with_prompt=task.asks_prompt
            )
        except Exception as error:  # of whatever tokenizer
            return self._mail.fail(f"the tokenizer failed: {type(error).__name__}: {error}")
        return self._mail.submit(given)
