"""Calls of Ray actors: the first failure at once, warnings along with the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plugin.config import JobConfig
from plugin.errors import ActorLost, MegatronTisError, ParallelError, SenderLost
from plugin.launch.console import Console, capture_warnings

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Reported:
    """The value of a call, and what its actor has warned of since the call before."""

    value: Any
    warnings: list[str]


class ReportingActor:
    """Base of the job's actors. The driver calls every method through `call`."""

    def __init__(self, config: JobConfig) -> None:
        self._warnings: list[str] = []
        capture_warnings(self._warnings.append)
        if not torch.cuda.is_available():
            torch.set_num_threads(config.threads_per_rank)

    def call(self, method: str, *arguments: Any) -> Reported:
        """The result of `method`, with the warnings so far."""
        value = getattr(self, method)(*arguments)
        warned = self._warnings[:]
        del self._warnings[: len(warned)]
        return Reported(value, warned)


def wait_for_all(
    references: Sequence[Any],
    names: Sequence[str],
    console: Console,
    *,
    timeout: float,
    while_waiting: Callable[[], None] | None = None,
) -> list[Any]:
    """Results in order; raises the first failure as soon as it is known, whatever the others do.

    names: who is called, for messages; while_waiting: called until all have answered
    """
    import ray

    deadline = time.monotonic() + timeout
    waiting = dict(zip(references, names, strict=True))
    results: dict[Any, Any] = {}
    while waiting:
        pause = _POLL_SECONDS if while_waiting else min(5.0, max(0.0, deadline - time.monotonic()))
        done, _ = ray.wait(list(waiting), num_returns=1, timeout=pause)
        for reference in done:
            results[reference] = result_of(reference, waiting.pop(reference), console)
        if while_waiting is not None:
            while_waiting()
        if waiting and time.monotonic() > deadline:
            raise ActorLost(
                f"{', '.join(waiting.values())} did not answer within {timeout:g} s; look for a hang "
                "there, or raise --step-timeout (--start-timeout while starting)"
            )
    return [results[reference] for reference in references]


def result_of(reference: Any, name: str, console: Console) -> Any:
    """The value of a finished `ReportingActor.call`, or the error that ended it.

    Our own errors come as themselves, those of other code as `ParallelError` with the traceback;
    `ActorLost` means that the process, or the data on its way to or from it, is gone.
    """
    import ray

    try:
        reported = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, MegatronTisError):
            raise cause from error
        if isinstance(cause, ray.exceptions.ObjectLostError):
            raise SenderLost(f"{name} did not get its data, the sender is gone: {cause}") from error
        raise ParallelError(f"{name} failed:\n{error}") from error
    except ray.exceptions.RayError as error:
        raise ActorLost(f"{name} died: {error}") from error
    for text in reported.warnings:
        console.warn(text, name)
    return reported.value
