"""Environments by the number of their episode, and the calls of them, wherever they run.

A job on Ray has them in processes of their own (`cluster/environment_actor.py`): their code, which
is the user's, would otherwise take the interpreter from the engine, and end the engine if it dies.
"""

from __future__ import annotations

from functools import partial
from threading import Lock
from typing import Any, Literal, Protocol

from plugin.environments.deadline_calls import CallFailure, DeadlineCalls
from plugin.environments.environment_protocol import Environment, MultiTurnTask

#: `start(index, seed)` makes the environment of an episode; the others are its own methods.
Method = Literal["start", "step", "reward", "close"]


class EnvironmentCalls(Protocol):
    """Makes calls of environments without waiting for them."""

    @property
    def open(self) -> int:
        """Calls without a result."""
        ...

    def submit(self, episode: int, method: Method, *arguments: Any) -> int:
        """Make a call; returns its number."""
        ...

    def finished(self, wait_seconds: float) -> list[tuple[int, Any]]:
        """Numbers and results or `CallFailure`s; waits up to `wait_seconds` for the first."""
        ...


class Environments:
    """The environments of a process. Calls of one episode come one after the other."""

    def __init__(self, task: MultiTurnTask) -> None:
        self._task = task
        self._of: dict[int, Environment] = {}
        self._closed_early: set[int] = set()
        self._lock = Lock()

    def call(self, episode: int, method: Method, *arguments: Any) -> Any:
        """The result of a call, None of `start` and `close`; whatever the environment raises."""
        if method == "start":
            made = self._task.environment(*arguments)
            with self._lock:
                given_up = episode in self._closed_early
                self._closed_early.discard(episode)
                if not given_up:
                    self._of[episode] = made
            if given_up:  # it took too long
                _close(made)
            return None
        if method == "close":
            with self._lock:
                environment = self._of.pop(episode, None)
                if environment is None:
                    self._closed_early.add(episode)
            return _close(environment)
        found = self._of.get(episode)
        if found is None:
            return CallFailure("the environment was lost with its process")
        return getattr(found, method)(*arguments)


def _close(environment: Environment | None) -> None:
    close = getattr(environment, "close", None)
    if close is not None:
        close()


class LocalEnvironments:
    """`EnvironmentCalls` in threads of this process, each call within `seconds`."""

    def __init__(self, task: MultiTurnTask, *, seconds: float, threads: int) -> None:
        self._environments = Environments(task)
        self._calls = DeadlineCalls(seconds=seconds, threads=threads)
        self.finished = self._calls.finished

    @property
    def open(self) -> int:
        return self._calls.open

    def submit(self, episode: int, method: Method, *arguments: Any) -> int:
        return self._calls.submit(partial(self._environments.call, episode, method, *arguments))
