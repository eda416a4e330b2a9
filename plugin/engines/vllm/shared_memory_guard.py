"""Removes the files of shared memory that a process and its children have, once it is gone.

vLLM's workers share memory through files in /dev/shm, which nobody removes when the engine's actor
is killed: Ray kills Python's resource tracker with it. Run as a script, with the standard library
alone, this waits until its standard input closes and then removes the files that it was given.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO

_DIRECTORY = "/dev/shm/"

#: Pipes that close with this process, however it ends.
_lifelines: list[IO[bytes] | None] = []


def mapped_files() -> set[str]:
    """Files in /dev/shm that this process and its descendants have mapped, but for deleted ones."""
    from plugin.engines.servers.process_guard import descendants

    found: set[str] = set()
    for process in (os.getpid(), *descendants(os.getpid())):
        try:
            lines = Path(f"/proc/{process}/maps").read_text().splitlines()
        except OSError:
            continue  # it has ended
        paths = {line[line.index(_DIRECTORY) :] for line in lines if _DIRECTORY in line}
        found |= {path for path in paths if not path.endswith(" (deleted)")}
    return found


def remove_with_this_process(files: Iterable[str]) -> None:
    """Have `files` removed when this process has ended."""
    starter = subprocess.Popen(
        [sys.executable, __file__, *files], stdin=subprocess.PIPE, start_new_session=True
    )
    starter.wait()
    _lifelines.append(starter.stdin)


def main(files: list[str]) -> None:
    """Wait for the owner's end; see above."""
    # Not a child of the owner's: Ray kills those.
    if os.fork():
        os._exit(0)
    sys.stdin.buffer.read()
    for file in files:
        Path(file).unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1:])
