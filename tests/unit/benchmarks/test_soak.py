"""What the soak says of memory, and whose it is."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from benchmarks.soak import members, memory_growth


def test_a_trend_is_of_processes_that_live_long_and_leaves_out_their_start() -> None:
    # 10 MB, 100 MB more in the first 100 s, and then 1 MB in 100 s: 36 MB per hour.
    life = [(t, 7, 10.0 + min(t, 100) + t / 100) for t in range(0, 1000, 10)]
    assert memory_growth(life)["per_hour"] == pytest.approx(36)
    # Processes that live for minutes only show how they start.
    lives = [(600.0 * n + t, n, 10.0 + t) for n in range(6) for t in range(0, 600, 10)]
    assert memory_growth(lives) == {"first": 10.0, "most": 600.0, "per_hour": None}


def test_a_command_whose_driver_has_ended_is_not_the_one_that_waits() -> None:
    waits = "import subprocess, sys; subprocess.run(['cat']); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", waits], **pipes) as command:  # type: ignore[call-overload]
        job = psutil.Process(command.pid)
        while not job.children():
            time.sleep(0.01)
        found = members(job)
        assert found["command"] == [job] and found["driver"] == job.children()
        assert not found["command that writes the report"]
        job.children()[0].kill()
        while any(p.status() != psutil.STATUS_ZOMBIE for p in job.children()):
            time.sleep(0.01)
        found = members(job)
        assert found["command that writes the report"] == [job]
        assert not found["command"] and not found["driver"]
        command.stdin.close()
