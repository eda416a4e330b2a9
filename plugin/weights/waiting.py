"""Waits of a transfer's members: for another thread, without polling, until the transfer ends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Generic, TypeVar

from plugin.errors import TransferError

T = TypeVar("T")


class Waits:
    """What the threads of one member wait with; all waits end with the transfer.

    timeout: seconds that one wait may take
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._turn = threading.Condition()
        self._reason: str | None = None

    @property
    def have_ended(self) -> bool:
        """Whether `end` was called."""
        return self._reason is not None

    def end(self, reason: str) -> None:
        """End all waits, now and later, in a `TransferError`; the first reason counts."""
        with self._turn:
            self._reason = self._reason or reason
            self._turn.notify_all()

    def require_running(self) -> None:
        """A `TransferError` once the transfer has ended."""
        if self._reason is not None:
            raise TransferError(self._reason)

    def wake(self) -> None:
        """Have the waiting threads look at their conditions."""
        with self._turn:
            self._turn.notify_all()

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`, which is looked at after every `wake`."""
        with self._turn:
            self._turn.wait_for(lambda: condition() or self.have_ended, self._timeout)
            if condition():
                return
        waited = f"the other members did not come within {self._timeout:g} s"
        raise TransferError(self._reason or waited)

    def result_of(self, work: Callable[[], T]) -> T:
        """The result of blocking `work`; its thread is abandoned if the transfer ends before."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as error:
                result.set_exception(error)
            self.wake()

        threading.Thread(target=run, daemon=True).start()
        self.until(result.done)
        return result.result()


class Handover(Generic[T]):
    """A queue from one thread of a member to another."""

    def __init__(self, waits: Waits, items: Iterable[T] = ()) -> None:
        self._waits, self._items = waits, deque(items)

    def put(self, item: T) -> None:
        """Hand an item over."""
        self._items.append(item)
        self._waits.wake()

    def get(self) -> T:
        """The next item; waits for it."""
        self._waits.until(lambda: len(self._items) > 0)
        return self._items.popleft()
