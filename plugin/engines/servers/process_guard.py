"""A guard that outlives an engine's process, and leaves nothing of it behind.

A script of its own with the standard library alone, which waits until its standard input, a pipe of
the process that started it, closes: because that process closed it or was killed.

    python process_guard.py STATUS DIRECTORY COMMAND ...

runs a server. At the end the command gets SIGTERM, and what is left of it and of all its
descendants SIGKILL. If the guard itself is killed, the command is killed with it. STATUS is the
number of a file descriptor that gets the process id of the guard and, at the end, the exit code of
the command. DIRECTORY is removed at the end.

    python process_guard.py --remove FILE ...

removes files at the end. vLLM's workers share memory through files in /dev/shm, which nobody
removes when the engine's actor is killed: Ray kills Python's resource tracker with it.
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
from collections.abc import Iterable
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_SECONDS, _GRACE_SECONDS = 0.2, 10.0
_REMOVE, _SHARED_MEMORY = "--remove", "/dev/shm/"

#: Pipes that close with this process, however it ends.
_lifelines: list[IO[bytes] | None] = []


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


def run_guarded(status: int, directory: str, command: list[str]) -> None:
    """Run the command; see above."""
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


def mapped_files() -> set[str]:
    """Files in /dev/shm that this process and its descendants have mapped, but for deleted ones."""
    found: set[str] = set()
    for process in (os.getpid(), *descendants(os.getpid())):
        try:
            lines = Path(f"/proc/{process}/maps").read_text().splitlines()
        except OSError:
            continue  # it has ended
        paths = {line[line.index(_SHARED_MEMORY) :] for line in lines if _SHARED_MEMORY in line}
        found |= {path for path in paths if not path.endswith(" (deleted)")}
    return found


def remove_with_this_process(files: Iterable[str]) -> None:
    """Have `files` removed when this process has ended."""
    starter = subprocess.Popen(
        [sys.executable, __file__, _REMOVE, *files], stdin=subprocess.PIPE, start_new_session=True
    )
    starter.wait()
    _lifelines.append(starter.stdin)


if __name__ == "__main__":
    # Not a child of the actor's: Ray kills those, and the guard has to outlive it by a moment.
    if os.fork():
        os._exit(0)
    if sys.argv[1] == _REMOVE:
        sys.stdin.buffer.read()
        for name in sys.argv[2:]:
            Path(name).unlink(missing_ok=True)
    else:
        run_guarded(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
