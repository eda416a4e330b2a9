"""Where weights may change under running responses: between two decode steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from plugin.errors import TransferError


class PausePoint:
    """One thread generates, another changes the weights; never both at the same time.

    The generating thread calls `pause` between two decode steps; whoever waits for `changing` then
    has its turn. A change goes before a call of `generating` that has not begun.

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
        """Keep changes out, except in `pause`."""
        self._begin_when_unchanged()
        try:
            yield
        finally:
            self._end()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Wait for the next pause, or until nothing is generated, and keep it from going on."""
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

    def pause(self) -> bool:
        """Let the changes that wait be made; whether there was one. Costs nothing if not."""
        if not self._changes_waiting:
            return False
        self._end()
        self._begin_when_unchanged()
        return True

    def _begin_when_unchanged(self) -> None:
        with self._turn:
            self._turn.wait_for(lambda: not self._busy and not self._must_wait())
            self._busy = True

    def _must_wait(self) -> bool:
        return self._changes_waiting > 0 or (self._waits and self._half_changed)

    def _end(self) -> None:
        with self._turn:
            self._busy = False
            self._turn.notify_all()
