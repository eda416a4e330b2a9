"""Environments by their episode: who is called, and who is closed."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from plugin.environments.deadline_calls import CallFailure
from plugin.environments.environment_calls import Environments, LocalEnvironments


class Recorded:
    """An environment that knows what was called."""

    def __init__(self, index: int, seed: int) -> None:
        self.called: list[Any] = [index, seed]

    def step(self, reply: str, history: str) -> str:
        self.called += [reply, history]
        return "answer"

    def close(self) -> None:
        self.called.append("closed")


class Task:
    """Makes environments, each once `may_start` allows."""

    def __init__(self) -> None:
        self.may_start = threading.Event()
        self.made: list[Recorded] = []

    def environment(self, index: int, seed: int) -> Recorded:
        assert self.may_start.wait(20)
        self.made.append(Recorded(index, seed))
        return self.made[-1]


def test_calls_reach_the_environment_of_their_episode_until_it_is_closed() -> None:
    task = Task()
    task.may_start.set()
    environments = Environments(task)  # type: ignore[arg-type]
    for episode in (7, 8):
        assert environments.call(episode, "start", episode * 10, 1) is None
    assert environments.call(8, "step", "reply", "history") == "answer"
    environments.call(8, "close")
    assert [one.called for one in task.made] == [
        [70, 1],
        [80, 1, "reply", "history", "closed"],
    ]
    assert environments.call(8, "step", "", "") == CallFailure(
        "the environment was lost with its process"
    )


@pytest.mark.timeout(60)
def test_an_environment_that_starts_too_late_is_closed_when_it_has() -> None:
    task = Task()
    calls = LocalEnvironments(task, seconds=0.2, threads=4)  # type: ignore[arg-type]
    started = calls.submit(1, "start", 0, 0)
    assert calls.finished(5.0) == [(started, CallFailure("no answer within 0.2 seconds"))]
    closed = calls.submit(1, "close")
    assert calls.finished(5.0) == [(closed, None)]
    task.may_start.set()
    while not (task.made and task.made[0].called[-1] == "closed"):
        threading.Event().wait(0.01)
