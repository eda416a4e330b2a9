"""A process that computes rewards: `python -m plugin.rewards.worker FD MEGABYTES`.

It gets a source of rewards over the socket `FD`, loads it, answers "ready" or the error, then
answers one response after the other until the socket is closed. It imports no torch of its own.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import traceback
from multiprocessing.connection import Connection

from plugin.environments.deadline_calls import CallFailure
from plugin.rewards.sandbox import die_with_the_caller


def main(descriptor: int, memory_mb: int) -> None:
    """Serve until the driver is gone."""
    # Also while a reward hangs, when nobody reads the socket.
    die_with_the_caller()
    # What a reward prints belongs to the person, not into the answers.
    os.dup2(2, 1)
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionError):
        source = connection.recv()
        try:
            rewards = source.load()
            rewards.import_libraries()
        except BaseException as error:
            connection.send(described(error))
            return
        _limit_memory(memory_mb)
        connection.send("ready")
        while True:
            given = connection.recv()
            try:
                answer = rewards.score(given)
            except BaseException as error:  # sys.exit() of a reward is a failed reward
                answer = described(error)
            connection.send(answer)


def described(error: BaseException) -> CallFailure:
    """An exception with the place in the code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return CallFailure(f"a reward failed: {type(error).__name__}: {str(error)[:500]}{where}")


def _limit_memory(megabytes: int) -> None:
    """So much more address space than the rewards have taken to load; Linux only."""
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
    main(int(sys.argv[1]), int(sys.argv[2]))
