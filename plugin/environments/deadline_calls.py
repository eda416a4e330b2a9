"""Run third-party code with a deadline; a failure or hang costs one result only."""

from __future__ import annotations

import queue
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class CallFailure:
    """Why a call has no result."""

    reason: str


class DeadlineCalls:
    """Makes calls in threads, at most `threads` at a time, each within `seconds`.

    A thread cannot be ended from outside. One that hangs is abandoned: it is a daemon, so it does
    not keep the process alive, it does not count against `threads`, and whatever it returns later
    is dropped.
    """

    def __init__(self, *, seconds: float, threads: int) -> None:
        self._seconds, self._threads, self._numbers = seconds, threads, 0
        self._finished: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._waiting: deque[tuple[int, Callable[[], Any]]] = deque()
        self._deadlines: dict[int, float] = {}

    @property
    def open(self) -> int:
        """Calls without a result."""
        return len(self._waiting) + len(self._deadlines)

    def submit(self, call: Callable[[], Any]) -> int:
        """Make a call as soon as a thread is free; returns its number."""
        self._numbers += 1
        self._waiting.append((self._numbers, call))
        self._start_waiting()
        return self._numbers

    def finished(self, wait_seconds: float) -> list[tuple[int, Any]]:
        """Numbers and results or `CallFailure`s; waits up to `wait_seconds` for the first."""
        results: list[tuple[int, Any]] = []
        until = time.monotonic() + wait_seconds
        while self._deadlines:
            now = time.monotonic()
            patience = 0.0 if results else min(until, min(self._deadlines.values())) - now
            try:
                number, result = self._finished.get(timeout=max(0.0, patience))
            except queue.Empty:
                results += self._overdue()
                if results or time.monotonic() >= until:
                    break
                continue
            if self._deadlines.pop(number, None) is not None:
                results.append((number, result))
                self._start_waiting()
        return results

    def _overdue(self) -> list[tuple[int, CallFailure]]:
        now = time.monotonic()
        late = [number for number, deadline in self._deadlines.items() if deadline <= now]
        for number in late:
            del self._deadlines[number]
        self._start_waiting()
        failure = CallFailure(f"no answer within {self._seconds:g} seconds")
        return [(number, failure) for number in late]

    def _start_waiting(self) -> None:
        while self._waiting and len(self._deadlines) < self._threads:
            number, call = self._waiting.popleft()
            self._deadlines[number] = time.monotonic() + self._seconds
            work = (call, number, self._finished)
            threading.Thread(target=_call, args=work, daemon=True).start()


def run_calls(
    calls: Sequence[Callable[[], T]], *, seconds: float, threads: int
) -> list[T | CallFailure]:
    """The results of all calls in order; see `DeadlineCalls`."""
    made = DeadlineCalls(seconds=seconds, threads=threads)
    numbers = [made.submit(call) for call in calls]
    results: dict[int, T | CallFailure] = {}
    while made.open:
        results.update(made.finished(seconds))
    return [results[number] for number in numbers]


class _Expired(BaseException):
    """Raised in a call at its deadline; not an `Exception`, which the call might catch."""


@contextmanager
def calls_here(seconds: float) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """A function that makes calls in this thread, each of which is interrupted after `seconds`.

    It returns a call's result, or a `CallFailure`. Interrupted by SIGALRM, which ends sleeping,
    waiting and Python loops, but not a library that stays in its own code; and not a function that
    uses SIGALRM itself. Signals reach the main thread only: in any other, calls are made by
    `run_calls`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda function: run_calls([function], seconds=seconds, threads=1)[0]
        return
    armed = False

    def expire(_signal: int, _frame: object) -> None:
        if armed:
            raise _Expired

    def call(function: Callable[[], Any]) -> Any:
        nonlocal armed
        try:
            try:
                armed = True
                # Then once a second, for code that swallows the first.
                signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
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

    # Installed once for all calls: changing a handler takes longer than most rewards.
    before = signal.signal(signal.SIGALRM, expire)
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    began = time.monotonic()
    try:
        yield call
    finally:
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)
        if remaining:  # an alarm set by the caller goes on
            left = max(remaining - (time.monotonic() - began), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left, interval)


def _call(
    function: Callable[[], T], number: int, finished: queue.SimpleQueue[tuple[int, T | CallFailure]]
) -> None:
    try:
        finished.put((number, function()))
    except BaseException as error:  # sys.exit() in a step must not look like one that hangs
        finished.put((number, CallFailure(f"{type(error).__name__}: {error}")))
