"""Worker processes on one machine that compute rewards while the job does something else.

A thread per process gives it one response at a time and waits for the answer. A process that does
not answer in time, or dies, is replaced; that costs the response it was working on. Both ends of
the socket are here: a worker is `python -m plugin.rewards.pool FD MEGABYTES`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol

from plugin.environments.deadline_calls import CallFailure
from plugin.rewards.code_tests import directory_prefix
from plugin.rewards.reward_set import Score
from plugin.rewards.sandbox import (
    adopt_orphans,
    die_with_the_caller,
    kill_descendants,
    remove_directory,
)

_START_SECONDS = 300.0


class RewardSource(Protocol):
    """What a worker is sent first.

    `load()` has the methods `import_libraries()` and `score(given) -> Score`. `timed_out(given)` is
    the score of a response on which time ran out; None if it has none.
    """

    def load(self) -> Any: ...

    def timed_out(self, given: Any) -> Score | None: ...


class Results:
    """The scores for one scorer, until it drops what it has submitted."""

    def __init__(self) -> None:
        self.done: queue.SimpleQueue[tuple[int, Score | CallFailure]] = queue.SimpleQueue()
        self.dropped = False


@dataclass(frozen=True)
class Job:
    """A response to score, and where its score goes."""

    ticket: int
    given: Any
    results: Results


class Pool(Protocol):
    """Workers, wherever they are."""

    def enqueue(self, ticket: int, given: Any, results: Results) -> None:
        """Have `given` scored by the next free worker; never waits."""
        ...

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        ...


class RewardPool:
    """Rewards in the background, on this machine.

    source: what the workers load
    seconds: time limit per response
    memory_mb: memory limit of a worker, on top of what loading takes
    """

    def __init__(
        self, source: RewardSource, *, workers: int, seconds: float, memory_mb: int
    ) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._starts: queue.SimpleQueue[CallFailure | None] = queue.SimpleQueue()
        self._workers = [_Worker(source, seconds, memory_mb) for _ in range(workers)]
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), daemon=True)
            for worker in self._workers
        ]
        for thread in self._threads:
            thread.start()

    def enqueue(self, ticket: int, given: Any, results: Results) -> None:
        """Have `given` scored by the next free worker; never waits."""
        self._jobs.put(Job(ticket, given, results))

    def first_start(self) -> CallFailure | None:
        """Wait until a worker has loaded the rewards; returns why it has not. To be called once."""
        return self._starts.get()

    @property
    def restarts(self) -> int:
        """Workers that were replaced because a reward hung or killed them."""
        return sum(worker.restarts for worker in self._workers)

    def close(self) -> None:
        """End the workers, whatever they are doing."""
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
        self._starts.put(worker.start())
        while (job := self._jobs.get()) is not None:
            if not job.results.dropped:
                job.results.done.put((job.ticket, worker.score(job.given)))
        worker.kill()


class PoolScorer:
    """Submits responses to a pool and collects their scores.

    Several may share a pool; whoever has made it closes it.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool, self._results, self._tickets = pool, Results(), itertools.count()

    def enqueue(self, given: Any) -> int:
        """A ticket for the score of what the source's `score` takes; never waits."""
        ticket = next(self._tickets)
        self.pool.enqueue(ticket, given, self._results)
        return ticket

    def finished(self, *, wait_seconds: float = 0.0) -> list[tuple[int, Score | CallFailure]]:
        """Tickets and scores since the last call; waits up to `wait_seconds` for the first."""
        found, done = [], self._results.done
        with contextlib.suppress(queue.Empty):
            if wait_seconds:
                found.append(done.get(timeout=wait_seconds))
            while True:
                found.append(done.get_nowait())
        return found

    def forget(self) -> None:
        """Drop what was submitted; a worker finishes the response that it is working on."""
        self._results.dropped = True
        self._results = Results()

    def close(self) -> None:
        self.pool.close()


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
        """Start the process and wait until it has loaded the rewards; returns why it has not."""
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
                    *(sys.executable, "-P", "-m", "plugin.rewards.pool"),
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
        if answer is None:
            late = f"a reward gave no answer within {self._seconds:g} seconds"
            answer = self._source.timed_out(given) or CallFailure(late)
        if not isinstance(answer, (Score, CallFailure)):
            answer = CallFailure("the reward's process answered something else")
        return answer

    def end(self) -> None:
        """End the process for good, from any thread; one waiting for an answer gets a failure."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                _kill_all(self._process)

    def _ask(self, what: Any, seconds: float) -> Any:
        """The answer; why there is none, or None if it took too long: both cost the worker."""
        connection = self._connection
        assert connection is not None
        reason, late = None, False
        try:
            connection.send(what)
            if connection.poll(seconds):
                return connection.recv()
            late = True
        except (EOFError, OSError):
            pass
        except Exception as error:  # what cannot be pickled, or unpickled
            reason = f"{type(error).__name__}: {error}"
        self.restarts += not self._closed
        code = self.kill()
        if late:
            return None
        return CallFailure(reason or f"the reward's process ended with exit code {code}")

    def kill(self) -> int | None:
        """End the process, if there is one, and its children; returns its exit code."""
        with self._lock:
            process, connection = self._process, self._connection
            self._process = self._connection = None
            if process is None or connection is None:
                return None
            connection.close()
            _kill_all(process)
        code = process.wait()
        for left in Path(tempfile.gettempdir()).glob(f"{directory_prefix(process.pid)}*"):
            with contextlib.suppress(OSError):
                remove_directory(str(left))
        return code


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker and all that it has started, in whatever session."""
    # Before the process is waited for: until then its number, which names the group, is its own.
    kill_descendants(process.pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def serve(descriptor: int, memory_mb: int) -> None:
    """Compute rewards in a worker process until the driver is gone.

    Gets a source of rewards over the socket `descriptor`, loads it, answers "ready" or the error,
    then answers one response after the other until the socket is closed. Imports no torch of its
    own.
    """
    # Also while a reward hangs and nobody reads the socket.
    die_with_the_caller()
    adopt_orphans()
    # What a reward prints goes to the terminal, not into the answers.
    os.dup2(2, 1)
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionError):
        source = connection.recv()
        try:
            rewards = source.load()
            rewards.import_libraries()
        except BaseException as error:
            connection.send(_described(error))
            return
        _limit_memory(memory_mb)
        connection.send("ready")
        while True:
            given = connection.recv()
            try:
                answer = rewards.score(given)
            except BaseException as error:  # sys.exit() of a reward is a failed reward
                answer = _described(error)
            connection.send(answer)


def _described(error: BaseException) -> CallFailure:
    """An exception and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return CallFailure(f"a reward failed: {type(error).__name__}: {str(error)[:500]}{where}")


def _limit_memory(megabytes: int) -> None:
    """Limit the address space to what loading took plus `megabytes`; Linux only."""
    try:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
    except OSError:
        return
    bound = pages * resource.getpagesize() + (megabytes << 20)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
