"""Worker processes that compute rewards while the driver does something else.

A thread per process gives it one response at a time and waits for the answer. A process that does
not answer in time, or dies, is replaced; that costs the response it was working on.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any, Protocol

from plugin.environments.deadline_calls import CallFailure
from plugin.rewards.reward_set import Score

_START_SECONDS = 300.0


class RewardSource(Protocol):
    """What a worker is sent first.

    `load()` has the methods `import_libraries()` and `score(given) -> Score`.
    """

    def load(self) -> Any: ...


class _Letters:
    """The answers to one asker, until it forgets them all."""

    def __init__(self) -> None:
        self.done: queue.SimpleQueue[tuple[int, Score | CallFailure]] = queue.SimpleQueue()
        self.forgotten = False


@dataclass(frozen=True)
class _Job:
    ticket: int
    given: Any
    letters: _Letters


class Mailbox:
    """Submits responses to a pool and collects their scores."""

    def __init__(self, jobs: queue.SimpleQueue[_Job | None]) -> None:
        self._jobs, self._letters, self._tickets = jobs, _Letters(), itertools.count()

    def submit(self, given: Any) -> int:
        """A ticket for the score of what the source's `score` takes; never waits."""
        ticket = next(self._tickets)
        self._jobs.put(_Job(ticket, given, self._letters))
        return ticket

    def fail(self, reason: str) -> int:
        """A ticket for a response that cannot be scored."""
        ticket = next(self._tickets)
        self._letters.done.put((ticket, CallFailure(reason)))
        return ticket

    def finished(self, *, wait_seconds: float = 0.0) -> list[tuple[int, Score | CallFailure]]:
        """What has been scored since the last call; waits for the first if asked to."""
        found, done = [], self._letters.done
        with contextlib.suppress(queue.Empty):
            if wait_seconds:
                found.append(done.get(timeout=wait_seconds))
            while True:
                found.append(done.get_nowait())
        return found

    def forget(self) -> None:
        """Drop what was submitted; a worker finishes the response that it is working on."""
        self._letters.forgotten = True
        self._letters = _Letters()


class RewardPool:
    """Rewards in the background.

    source: what the workers load
    seconds: that one response may take
    memory_mb: that a worker may take on top of what loading takes
    """

    def __init__(
        self, source: RewardSource, *, workers: int, seconds: float, memory_mb: int
    ) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._workers = [_Worker(source, seconds, memory_mb) for _ in range(workers)]
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), daemon=True)
            for worker in self._workers
        ]
        for thread in self._threads:
            thread.start()

    def mailbox(self) -> Mailbox:
        """Where one asker submits responses and finds their scores; others have their own."""
        return Mailbox(self._jobs)

    @property
    def restarts(self) -> int:
        """Workers that were replaced because a reward hung or killed them."""
        return sum(worker.restarts for worker in self._workers)

    def close(self) -> None:
        """End the workers, whatever they do."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        for worker in self._workers:
            self._jobs.put(None)
            worker.end()
        for thread in self._threads:
            thread.join(timeout=5)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, worker: _Worker) -> None:
        worker.start()
        while (job := self._jobs.get()) is not None:
            if not job.letters.forgotten:
                job.letters.done.put((job.ticket, worker.score(job.given)))
        worker.kill()


class _Worker:
    """One process and the socket to it; used by one thread, closed by any."""

    def __init__(self, source: RewardSource, seconds: float, memory_mb: int) -> None:
        self._source, self._seconds, self._memory_mb = source, seconds, memory_mb
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._closed = False
        self._lock = threading.Lock()
        self.restarts = 0

    def start(self) -> CallFailure | None:
        """Start the process and wait until it has loaded the rewards; why it has not."""
        with self._lock:
            if self._closed:
                return CallFailure("the job ends")
            try:
                self._process, self._connection = self._spawn()
            except OSError as error:  # too many processes or files, no memory
                return CallFailure(str(error))
        answer = self._ask(self._source, _START_SECONDS)
        if answer == "ready":
            return None
        self.kill()
        return answer if isinstance(answer, CallFailure) else CallFailure("it did not start")

    def _spawn(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = Pipe()
        with theirs:
            descriptor = theirs.fileno()
            # What the driver can import, and in that order; `-P`: not the working directory first.
            path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "plugin.rewards.worker"),
                    *(str(descriptor), str(self._memory_mb)),
                ],
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=(descriptor,),
                stdin=subprocess.DEVNULL,
                # Ctrl-C is for the driver; and what a reward has started ends with its process.
                start_new_session=True,
            )
        return process, ours

    def score(self, given: Any) -> Score | CallFailure:
        """The score of a response, in a new process if the last one is gone."""
        if self._connection is None:
            problem = self.start()
            if problem is not None:
                return CallFailure(f"no process for rewards: {problem.reason}")
        answer = self._ask(given, self._seconds)
        if not isinstance(answer, (Score, CallFailure)):
            answer = CallFailure("the reward's process answered something else")
        return answer

    def end(self) -> None:
        """End the process for good; of any thread. The one that waits for an answer is told."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                _kill_group(self._process)

    def _ask(self, what: Any, seconds: float) -> Any:
        connection = self._connection
        assert connection is not None
        reason: str | None = None
        try:
            connection.send(what)
            if connection.poll(seconds):
                return connection.recv()
            reason = f"a reward gave no answer within {seconds:g} seconds"
        except (EOFError, OSError):
            pass
        except Exception as error:  # what cannot be pickled, or unpickled
            reason = f"{type(error).__name__}: {error}"
        self.restarts += not self._closed
        code = self.kill()
        return CallFailure(reason or f"the reward's process ended with exit code {code}")

    def kill(self) -> int | None:
        """End the process, if there is one, and what it has started; its exit code."""
        with self._lock:
            process, connection = self._process, self._connection
            self._process = self._connection = None
            if process is None or connection is None:
                return None
            connection.close()
            _kill_group(process)
        return process.wait()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    # Before the process is waited for: until then its number, which names the group, is its own.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
