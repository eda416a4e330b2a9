"""A job's driver in a process of its own, and the process that waits for it and has the last word.

Ray ends its driver without a Python exception when it dies itself, and so does the kernel when
memory is short. The process that the user started survives that: it forks before anything heavy is
imported, passes signals on, and learns over a pipe whether the driver ended by itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_PASSED_ON = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class DriverEnd:
    """How the driver's process ended.

    code: its exit code, or minus the signal that killed it
    said: what it told before: `run_dir`, the `cause` of its end, `ended` if nothing is left to say
    """

    code: int
    said: dict[str, Any]

    @property
    def cause(self) -> str:
        """Why it ended without a word, for a person."""
        if "cause" in self.said:
            return str(self.said["cause"])
        if self.code == -signal.SIGKILL:
            return "the driver was killed (SIGKILL); if by nobody, memory was short"
        if self.code < 0:
            return f"the driver crashed ({signal.Signals(-self.code).name})"
        if "run_dir" not in self.said:
            return (
                f"the driver ended with exit code {self.code} before the job began; what a library "
                "printed above may say why"
            )
        return (
            "Ray ended the driver, as it does when its raylet on this machine has died; the raylet "
            "was killed, or memory was short"
        )


class DriverPipe:
    """What a driver tells the process that waits for it, if there is one."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor

    @property
    def is_read(self) -> bool:
        """Whether somebody waits for this driver."""
        return self._descriptor is not None

    def tell(self, **facts: Any) -> None:
        """Add facts; see `DriverEnd.said`."""
        if self._descriptor is not None:
            os.write(self._descriptor, (json.dumps(facts) + "\n").encode())


def fork_driver() -> DriverPipe | DriverEnd:
    """Fork. Returns a pipe in the driver, and in the process that waits the end of the driver.

    The driver has a session of its own: a signal to the process group of a terminal reaches it
    once, passed on, and the processes of its Ray not at all. It dies with the waiting process.
    """
    if not sys.platform.startswith("linux"):
        return DriverPipe()
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent, child = os.getpid(), os.fork()
    if child:
        os.close(writer)
        return _wait(child, reader)
    os.close(reader)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()
    return DriverPipe(writer)


def _wait(child: int, reader: int) -> DriverEnd:
    with _signals_passed_on(child):
        _, status = os.waitpid(child, 0)
    os.set_blocking(reader, False)
    said: dict[str, Any] = {}
    with open(reader, "rb", buffering=0) as pipe:
        for line in (pipe.read(1 << 20) or b"").splitlines():
            said |= json.loads(line)
    return DriverEnd(os.waitstatus_to_exitcode(status), said)


@contextmanager
def _signals_passed_on(child: int) -> Iterator[None]:
    def pass_on(number: int, _frame: Any) -> None:
        os.kill(child, number)

    def stop(_number: int, _frame: Any) -> None:
        # Ctrl-Z stops a job whole; the processes of its Ray are in the driver's group.
        os.killpg(child, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.killpg(child, signal.SIGCONT)

    handlers = {**dict.fromkeys(_PASSED_ON, pass_on), signal.SIGTSTP: stop}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def newest_checkpoints(run_dir: Path) -> tuple[Path | None, Path | None]:
    """The newest complete checkpoint of a run that ended without a word, and its best one."""
    from plugin.megatron_backend.checkpoint.directory import best_checkpoint, complete_checkpoints

    complete = complete_checkpoints((run_dir / "checkpoints").resolve())
    return (complete[-1] if complete else None), best_checkpoint(run_dir / "checkpoints")
