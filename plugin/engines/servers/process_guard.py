"""Runs a command until whoever started it is gone, and leaves no process of it behind.

A script of its own with the standard library alone: it stands between an engine's actor and the
server that the actor starts. Its standard input is a pipe of the actor's. When that closes, because
the actor closed it or was killed, the command gets SIGTERM, and what is left of it and of all its
descendants SIGKILL. If the guard itself is killed, the command is killed with it.

    python process_guard.py STATUS DIRECTORY COMMAND ...

STATUS is the number of a file descriptor that gets the process id of the guard and, at the end, the
exit code of the command. DIRECTORY is removed at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_SECONDS, _GRACE_SECONDS = 0.2, 10.0


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def descendants(process: int) -> list[int]:
    """The processes below `process`, also those whose parent has ended (see the subreaper)."""
    found = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children = [int(text) for text in file.read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _end_all(command: subprocess.Popen[bytes]) -> None:
    if command.poll() is None:
        command.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.wait(_GRACE_SECONDS)
    # Those that are killed may just have started others.
    while left := descendants(os.getpid()):
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
        _reap()


def main(status: int, directory: str, command: list[str]) -> None:
    """Run the command; see above."""
    # Not a child of the actor's: Ray kills those, and the guard has to outlive it by a moment.
    if os.fork():
        os._exit(0)
    asked_to_end: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked_to_end.append(number))
    # Descendants whose parents end become children of this process.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    os.write(status, f"{os.getpid()}\n".encode())
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    try:
        while process.poll() is None and not asked_to_end:
            readable, _, _ = select.select([sys.stdin], [], [], _POLL_SECONDS)
            if readable and not os.read(sys.stdin.fileno(), 1):
                break
    finally:
        _end_all(process)
        shutil.rmtree(directory, ignore_errors=True)
        with contextlib.suppress(BrokenPipeError):
            os.write(status, f"{process.returncode}\n".encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
