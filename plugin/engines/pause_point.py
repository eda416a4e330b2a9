"""Where weights may change under running responses: between two decode steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from plugin.errors import TransferError


class PausePoint:
    """One thread generates, another changes the weights; never both at the same time.

    Each decode step is made inside `generating`. A change that waits goes before the next step.

    waits: after a `TransferError` in a change, nothing is generated until another one succeeds
    """

    def __init__(self, *, waits: bool = False) -> None:
        self._waits = waits
        self._turn = threading.Condition()
        self._busy = False
        self._changes_waiting = 0
        self._half_changed = False

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Keep changes out."""
        with self._turn:
            self._turn.wait_for(lambda: not (self._busy or self._must_wait()))
            self._busy = True
        try:
            yield
        finally:
            self._end()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Wait for the end of a step, and keep the next one from beginning."""
        with self._turn:
            self._changes_waiting += 1
            self._turn.wait_for(lambda: not self._busy)
            self._busy = True
        try:
            yield
            self._half_changed = False
        except TransferError:
            self._half_changed = True
            raise
        finally:
            with self._turn:
                self._changes_waiting -= 1
            self._end()

    def _must_wait(self) -> bool:
        return self._changes_waiting > 0 or (self._waits and self._half_changed)

    def _end(self) -> None:
        with self._turn:
            self._busy = False
            self._turn.notify_all()
