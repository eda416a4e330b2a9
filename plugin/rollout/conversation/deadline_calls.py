"""Run calls of somebody else's code with a deadline; a failure or hang costs one result only."""

from __future__ import annotations

import queue
import signal
import threading
import time
import traceback
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


class _Expired(BaseException):
    """Raised in a call at its deadline; not an `Exception`, which the call might catch."""


def call_here(function: Callable[[], T], *, seconds: float) -> T | CallFailure:
    """The result of one call in this thread, which is interrupted after `seconds`.

    Interrupted by SIGALRM, which ends sleeping, waiting and Python loops, but not a library that
    stays in its own code; and not a function that uses SIGALRM itself. Signals reach the main
    thread only: in any other, the call is made by `run_calls`.
    """
    if threading.current_thread() is not threading.main_thread():
        return run_calls([function], seconds=seconds, threads=1)[0]
    armed = True

    def expire(_signal: int, _frame: object) -> None:
        if armed:
            raise _Expired

    before = signal.signal(signal.SIGALRM, expire)
    # Once a second from then on, for code that swallows the first.
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    began = time.monotonic()
    try:
        try:
            return function()
        finally:
            armed = False
    except _Expired:
        return CallFailure(f"no answer within {seconds:g} seconds")
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({frames[-1].filename}, line {frames[-1].lineno})"
        return CallFailure(f"{type(error).__name__}: {error}{where}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)
        if remaining:  # somebody else's alarm goes on
            left = max(remaining - (time.monotonic() - began), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left, interval)


def _call(
    function: Callable[[], T], number: int, finished: queue.SimpleQueue[tuple[int, T | CallFailure]]
) -> None:
    try:
        finished.put((number, function()))
    except BaseException as error:  # sys.exit() in a step must not look like one that hangs
        finished.put((number, CallFailure(f"{type(error).__name__}: {error}")))
