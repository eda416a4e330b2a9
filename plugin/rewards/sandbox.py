"""Runs a Python program that a model wrote, with limits: `sandbox.py MEGABYTES SECONDS FILE`.

A script of its own, which imports the standard library alone. What it limits itself to before the
program starts:

    memory     RLIMIT_AS                      always
    CPU time   RLIMIT_CPU                     always; wall-clock time is the caller's to limit
    files      RLIMIT_FSIZE, 16 MB per file   always
    network    a network namespace            where the kernel lets the user make one

It does not hide the file system: the program reads what the job's user can read.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_FILE_BYTES = 16 << 20


def leave_network() -> bool:
    """Move this process into a network namespace without interfaces; whether that was possible."""
    try:
        unshare = ctypes.CDLL(None, use_errno=True).unshare
    except (OSError, AttributeError):
        return False
    return unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0 or unshare(_CLONE_NEWNET) == 0


def die_with_the_caller() -> None:
    """End when the process that started this one does; Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def limit(memory_mb: int, seconds: int) -> None:
    """Limit memory, CPU time, the size of files and core dumps of this process."""
    for what, bound in (
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(what, (bound, bound))


if __name__ == "__main__":
    if sys.argv[1:] == ["--probe"]:
        sys.exit(0 if leave_network() else 3)
    leave_network()
    die_with_the_caller()  # after the namespace, whose new rights would undo it
    limit(int(sys.argv[1]), int(sys.argv[2]))
    program = os.path.abspath(sys.argv[3])
    sys.argv = [program]
    runpy.run_path(program, run_name="__main__")
