"""Calls of Ray actors: the first failure at once, warnings and prints along with the results, and
which actors have stopped reacting.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TextIO, TypeVar, cast

import torch

from plugin.cluster.placement import torch_threads
from plugin.config import JobConfig
from plugin.errors import ActorLost, MegatronTisError, ParallelError, SenderLost
from plugin.observe.console import Console, PrintedLines, capture_warnings
from plugin.rewards.sandbox import die_with_the_caller

_POLL_SECONDS = 0.05
#: Between two questions for all open calls, see `EndedCalls`.
_SWEEP_SECONDS = 10.0
_MESSAGES = "megatron_tis_messages"

#: Longer than a process on a busy machine stays without its turn.
SILENCE_SECONDS = 30.0
_HEARTBEAT_SECONDS = 1.0
#: A driver that has not looked at the clock for longer was stopped itself (Ctrl-Z, a frozen
#: container): what it waits for had no chance to answer it, and gets its time again.
LONGEST_LOOK = 15.0

Who = TypeVar("Who")

#: How many lines that an actor prints during one call are shown.
_LINES_SHOWN = 20


@dataclass(frozen=True)
class Messages:
    """Warnings and prints of an actor since its previous call."""

    warnings: list[str]
    printed: list[str]

    def show(self, console: Console, name: str) -> None:
        """Show them on the driver's console with the name of the actor."""
        for text in self.warnings:
            console.warn(text, name)
        shown = self.printed[:_LINES_SHOWN]
        if len(self.printed) > len(shown):
            shown.append(f"... and {len(self.printed) - len(shown)} more lines")
        for line in shown:
            console.log(f"{name}: {line}")


@dataclass(frozen=True)
class Reported:
    """The value of a call, with the messages of its actor."""

    value: Any
    messages: Messages


def _die_with_the_raylet() -> None:
    """Have the kernel end this worker of Ray with its raylet; Linux only.

    A worker ends by itself when it notices, but one that is stopped would keep its memory and its
    device for ever.
    """
    with contextlib.suppress(OSError):
        if Path(f"/proc/{os.getppid()}/comm").read_text() == "raylet\n":
            die_with_the_caller()


class ReportingActor:
    """Base of the job's actors. The driver calls every method through `call`."""

    def __init__(self) -> None:
        _die_with_the_raylet()
        self._warnings: list[str] = []
        self._printed: list[str] = []
        self._taking = threading.Lock()
        capture_warnings(self._warnings.append)
        sys.stdout = cast(TextIO, PrintedLines(sys.stdout, self._printed.append))

    def use_threads(
        self, config: JobConfig, kind: Literal["rank", "engine"], hf_config: Mapping[str, Any]
    ) -> None:
        """Set torch's threads for a model on CPU; on a GPU they stay as they are."""
        if torch.cuda.is_available():
            return
        linux = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1
        hidden = int(hf_config["hidden_size"])
        torch.set_num_threads(torch_threads(config, kind, hidden_size=hidden, cores=cores))

    def call(self, method: str, *arguments: Any) -> Reported:
        """The result of `method` with the messages so far; an error carries them, too."""
        try:
            value = getattr(self, method)(*arguments)
        except Exception as error:
            error.__dict__[_MESSAGES] = self._take_messages()
            raise
        return Reported(value, self._take_messages())

    def call_apart(self, method: str, *arguments: Any) -> tuple[Any, ...]:
        """As `call` for a method that returns a head and parts, which become objects of their own.

        The caller owns them, and none moves before somebody asks for it.
        """
        reported = self.call(method, *arguments)
        head, parts = reported.value
        return Reported(head, reported.messages), *parts

    def _take_messages(self) -> Messages:
        with self._taking:
            taken = Messages(self._warnings[:], self._printed[:])
            del self._warnings[: len(taken.warnings)]
            del self._printed[: len(taken.printed)]
            return taken


class EndedCalls:
    """Tells which of many calls have ended; those that have not cost nothing.

    Ray reports the end of a call from a thread of its own. What it fails to report is found by
    asking for all calls, at a low rate.
    """

    def __init__(self, calls: Iterable[Any] = ()) -> None:
        self._open: dict[Any, Future[Any]] = {}
        self._ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._swept = time.monotonic()
        for call in calls:
            self.add(call)

    def add(self, call: Any) -> None:
        """Watch a call."""
        self._open[call] = call.future()
        self._open[call].add_done_callback(lambda _: self._ended.put(call))

    def wake(self) -> None:
        """Have a `take` that waits return, from another thread."""
        self._ended.put(None)

    def take(self, wait_seconds: float = 0.0) -> dict[Any, Future[Any]]:
        """Calls that have ended since the last time, for `result_of`; waits for the first."""
        self._sweep()
        ended = []
        with contextlib.suppress(queue.Empty):
            ended.append(self._ended.get(block=wait_seconds > 0, timeout=wait_seconds or None))
            while True:
                ended.append(self._ended.get_nowait())
        return {call: self._open.pop(call) for call in ended if call in self._open}

    def _sweep(self) -> None:
        import ray

        if self._open and time.monotonic() - self._swept > _SWEEP_SECONDS:
            for call in ray.wait(list(self._open), num_returns=len(self._open), timeout=0)[0]:
                self._ended.put(call)
            self._swept = time.monotonic()


def wait_for_all(
    references: Sequence[Any],
    names: Sequence[str],
    console: Console,
    *,
    timeout: float,
    option: str = "--step-timeout (--start-timeout or --load-timeout at the start)",
    while_waiting: Callable[[], None] | None = None,
) -> list[Any]:
    """Results in order; the first failure is raised at once, without waiting for the others.

    names: who is called, for messages; option: the flag that `timeout` follows from
    while_waiting: called at a low rate meanwhile
    """
    deadline = time.monotonic() + timeout
    waiting = dict(zip(references, names, strict=True))
    calls, results, last = EndedCalls(references), {}, 0.0
    while waiting:
        looked = time.monotonic()
        pause = _POLL_SECONDS if while_waiting else min(5.0, max(0.0, deadline - time.monotonic()))
        for reference, ended in calls.take(pause).items():
            results[reference] = result_of(reference, waiting.pop(reference), console, ended)
        # Not once per rank that has ended: there may be hundreds.
        if while_waiting is not None and time.monotonic() - last >= _POLL_SECONDS:
            last = time.monotonic()
            while_waiting()
        if time.monotonic() - looked > LONGEST_LOOK:
            deadline += time.monotonic() - looked
        if waiting and time.monotonic() > deadline:
            raise ActorLost(
                f"{', '.join(waiting.values())} did not answer within {timeout:g} s; look for a "
                f"hang there, or raise {option}"
            )
    return [results[reference] for reference in references]


def result_of(reference: Any, name: str, console: Console, ended: Future[Any] | None = None) -> Any:
    """The value of a finished `ReportingActor.call`, or the error that ended it.

    ended: from `EndedCalls`, which has got the value already
    Our own errors come as themselves, those of other code as `ParallelError` with the traceback;
    `ActorLost` means that the process, or the data on its way to or from it, is gone.
    """
    import ray

    try:
        known = ended if ended is not None and ended.done() else None
        reported = ray.get(reference) if known is None else known.result()
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        messages = getattr(cause, _MESSAGES, None)
        if messages is not None:
            messages.show(console, name)
        if isinstance(cause, MegatronTisError):
            raise cause from error
        if isinstance(cause, ray.exceptions.ObjectLostError):
            raise SenderLost(f"{name} did not get its data, the sender is gone: {cause}") from error
        raise ParallelError(f"{name} failed:\n{error}") from error
    except ray.exceptions.RayError as error:
        raise ActorLost(f"{name} died: {error}") from error
    reported.messages.show(console, name)
    return reported.value


class Heartbeat(Generic[Who]):
    """Pings actors every second, in a thread that their other calls do not block.

    A process that is stopped, or whose machine is, fails no call: Ray would wait for it for ever.
    """

    def __init__(self, ask: Callable[[Who], Any]) -> None:
        self._ask = ask
        self._asked: dict[Who, tuple[Any, float]] = {}
        self._checked = 0.0

    def silent(self, actors: Collection[Who]) -> list[Who]:
        """Actors that have not answered a ping for too long; never blocks."""
        import ray

        now = time.monotonic()
        if now - self._checked < min(_HEARTBEAT_SECONDS, SILENCE_SECONDS):
            return []
        if now - self._checked > LONGEST_LOOK:
            self._asked.clear()
        self._checked = now
        calls = {call: who for who, (call, _) in self._asked.items()}
        if calls:
            done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
            for call in done:
                del self._asked[calls[call]]
        for who in actors:
            if who not in self._asked:
                self._asked[who] = (self._ask(who), now)
        return [who for who in actors if now - self._asked[who][1] > SILENCE_SECONDS]
