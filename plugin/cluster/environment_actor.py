"""The actor that has the environments of an engine, and its handle in the engine's process."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, cast

from plugin.cluster.remote_calls import EndedCalls
from plugin.config import JobConfig
from plugin.environments.deadline_calls import CallFailure, run_calls
from plugin.environments.environment_calls import Environments, Method
from plugin.environments.environment_protocol import MultiTurnTask
from plugin.tasks.loading import load_task, load_tokenizer

#: What the actor of an engine's environments reserves, on any node.
ENVIRONMENT_CPUS = 1.0


class EnvironmentActor:
    """Calls environments, several at a time, each within --environment-timeout."""

    def __init__(self, config: JobConfig) -> None:
        task = load_task(config, load_tokenizer(config))
        self._environments = Environments(cast(MultiTurnTask, task))
        self._seconds = config.environment_timeout

    def call(self, episode: int, method: Method, *arguments: Any) -> Any:
        """The result of a call or a `CallFailure`; a call that hangs is abandoned."""
        call = partial(self._environments.call, episode, method, *arguments)
        return run_calls([call], seconds=self._seconds, threads=1)[0]


class RemoteEnvironments:
    """`EnvironmentCalls` in an actor; it ends with this process, and a new one replaces a dead one.

    Environments that were in a dead one fail their episodes.
    """

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        self._calls, self._numbers = EndedCalls(), itertools.count(1)
        self._asked: dict[Any, tuple[int, Any]] = {}  # call -> its number, the actor
        self._actor = self._start()

    def _start(self) -> Any:
        import ray

        remote: Any = ray.remote
        body = remote(EnvironmentActor).options(
            num_cpus=ENVIRONMENT_CPUS, max_concurrency=self._config.environment_threads
        )
        return body.remote(self._config)

    @property
    def open(self) -> int:
        """Calls without a result."""
        return len(self._asked)

    def submit(self, episode: int, method: Method, *arguments: Any) -> int:
        """Make a call; returns its number."""
        number = next(self._numbers)
        call = self._actor.call.remote(episode, method, *arguments)
        self._asked[call] = number, self._actor
        self._calls.add(call)
        return number

    def finished(self, wait_seconds: float) -> list[tuple[int, Any]]:
        """Numbers and results or `CallFailure`s; waits up to `wait_seconds` for the first."""
        import ray

        results = []
        for call, ended in self._calls.take(wait_seconds).items():
            number, actor = self._asked.pop(call)
            try:
                result = ended.result()
            except ray.exceptions.RayTaskError as error:  # what cannot be sent
                result = CallFailure(str(error.cause))
            except ray.exceptions.RayError as error:
                result = CallFailure(f"the environments' process died: {error}")
                if actor is self._actor:
                    self._actor = self._start()
            results.append((number, result))
        return results
