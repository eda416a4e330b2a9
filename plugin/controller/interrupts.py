"""Ctrl-C and SIGTERM during a job: at once, or when what is under way has been finished."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Schedulers signal every process of a job, and the one that waits for the driver passes it on.
_SAME_SECONDS = 0.2


class Interrupts:
    """Turns both signals into `KeyboardInterrupt`.

    `ray job stop` and most schedulers end a job with SIGTERM, so it is treated like Ctrl-C. In a
    thread other than the main one nothing is handled.

    log: prints a message for a person
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._holding = self._pending = False
        self._latest = -_SAME_SECONDS

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals until the body ends."""
        with _handler(self._interrupt):
            yield

    @contextlib.contextmanager
    def held_back(self, until: str) -> Iterator[None]:
        """Raise the first interrupt at the end of the body, the second one at once.

        until: what the body finishes, for the message
        """
        self._holding, self._until = True, until
        try:
            yield
        finally:
            self._holding = False
            if self._pending:
                self._pending = False
                raise KeyboardInterrupt

    def _interrupt(self, _signal: int, _frame: Any) -> None:
        now = time.monotonic()
        if now - self._latest < _SAME_SECONDS:
            return
        self._latest = now
        if not self._holding or self._pending:
            self._holding = self._pending = False
            raise KeyboardInterrupt
        self._pending = True
        # The signal may have come while the driver was printing.
        with contextlib.suppress(RuntimeError):
            self._log(f"interrupted: {self._until}; again to end at once")


@contextlib.contextmanager
def ignored_interrupts() -> Iterator[None]:
    """Let the body, which is short, finish whatever the user presses."""
    with _handler(signal.SIG_IGN):
        yield


@contextlib.contextmanager
def _handler(handler: Any) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
