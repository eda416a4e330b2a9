"""Run calls of somebody else's code side by side; a failure or hang costs one result only."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class CallFailure:
    """Why a call has no result."""

    reason: str


def run_calls(
    calls: Sequence[Callable[[], T]], *, seconds: float, threads: int
) -> list[T | CallFailure]:
    """The results in order; at most `threads` calls at a time, each within `seconds`.

    A thread cannot be ended from outside. One that hangs is abandoned: it is a daemon, so it does
    not keep the process alive, it does not count against `threads`, and whatever it returns later
    is dropped.
    """
    results: list[T | CallFailure] = [CallFailure("not called")] * len(calls)
    finished: queue.SimpleQueue[tuple[int, T | CallFailure]] = queue.SimpleQueue()
    waiting = deque(range(len(calls)))
    deadlines: dict[int, float] = {}
    while waiting or deadlines:
        while waiting and len(deadlines) < threads:
            number = waiting.popleft()
            deadlines[number] = time.monotonic() + seconds
            work = (calls[number], number, finished)
            threading.Thread(target=_call, args=work, daemon=True).start()
        try:
            patience = max(0.0, min(deadlines.values()) - time.monotonic())
            number, result = finished.get(timeout=patience)
        except queue.Empty:
            now = time.monotonic()
            for late in [number for number, deadline in deadlines.items() if deadline <= now]:
                results[late] = CallFailure(f"no answer within {seconds:g} seconds")
                del deadlines[late]
            continue
        if number in deadlines:
            results[number] = result
            del deadlines[number]
    return results


def _call(
    function: Callable[[], T], number: int, finished: queue.SimpleQueue[tuple[int, T | CallFailure]]
) -> None:
    try:
        finished.put((number, function()))
    except BaseException as error:  # sys.exit() in a step must not look like one that hangs
        finished.put((number, CallFailure(f"{type(error).__name__}: {error}")))
