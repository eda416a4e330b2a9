"""Shared memory of a killed process: its files go with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

OWNER = """
import mmap, os, subprocess, sys, time
from plugin.engines.servers.process_guard import mapped_files, remove_with_this_process

def mapped(name):
    file = os.open(f"/dev/shm/{name}", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 4096)
    return mmap.mmap(file, 4096)

kept = mapped(f"test-kept-{os.getpid()}")
before = mapped_files()
own = mapped(f"test-own-{os.getpid()}")
code = f"import mmap, os, time; f = os.open('/dev/shm/test-child-{os.getpid()}', os.O_RDWR | os.O_CREAT); " \\
    "os.ftruncate(f, 4096); m = mmap.mmap(f, 4096); print('mapped', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
remove_with_this_process(mapped_files() - before)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_what_was_mapped_in_between_is_removed_after_a_kill_and_nothing_else() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    kept, *removed = [
        Path(f"/dev/shm/test-{name}-{owner.pid}") for name in ("kept", "own", "child")
    ]
    try:
        assert kept.exists() and all(file.exists() for file in removed)
        owner.kill()
        owner.wait()
        deadline = time.monotonic() + 60
        while any(file.exists() for file in removed):
            assert time.monotonic() < deadline, "the files outlive their owner"
            time.sleep(0.02)
        assert kept.exists()
    finally:
        os.kill(child, signal.SIGKILL)
        owner.stdout.close()
        for file in (kept, *removed):
            file.unlink(missing_ok=True)
