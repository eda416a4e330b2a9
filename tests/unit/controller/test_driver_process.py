"""A driver that ends without a word does not end the job without one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from plugin.cluster import ray_watchdog
from plugin.cluster.ray_watchdog import RayWatchdog
from plugin.controller.driver_process import DriverEnd

pytestmark = [pytest.mark.hostile, pytest.mark.usefixtures("jumping_clock")]

DRIVER = """
import os, signal, sys, time
from plugin.controller.driver_process import DriverEnd, fork_driver

side = fork_driver()
if isinstance(side, DriverEnd):
    print("waited:", side.code, sorted(side.said), side.cause if "ended" not in side.said else "")
    sys.exit(3)
side.tell(run_dir="runs/a")
print("driver", os.getpid(), flush=True)
seen = []
signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
{body}
side.tell(ended=True)
"""


def driver(body: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(body=body)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("body", "last_line"),
    [
        ("os._exit(1)", "waited: 1 ['run_dir'] Ray ended the driver, as it does when its raylet"),
        ("os.kill(os.getpid(), 9)", "waited: -9 ['run_dir'] the driver was killed (SIGKILL)"),
        ("os.abort()", "waited: -6 ['run_dir'] the driver crashed (SIGABRT)"),
        ("side.tell(cause='frozen'); os._exit(1)", "waited: 1 ['cause', 'run_dir'] frozen"),
        ("", "waited: 0 ['ended', 'run_dir']"),
    ],
)
def test_a_driver_cannot_vanish_unnoticed(body: str, last_line: str) -> None:
    process = driver(body)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 3
    assert output.splitlines()[-1].startswith(last_line), output


def test_a_signal_to_the_waiting_process_is_not_kept_from_the_driver() -> None:
    process = driver("while not seen: time.sleep(0.01)\ntime.sleep(0.2)\nprint(len(seen), 'seen')")
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.2)  # its handler is set right after
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert output.splitlines()[0] == "1 seen" and process.returncode == 3


def test_a_driver_does_not_survive_the_process_that_waits_for_it() -> None:
    process = driver("time.sleep(60)")
    assert process.stdout is not None
    pid = int(process.stdout.readline().split()[1])
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while ray_watchdog._state(pid) not in ("", "Z"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def raylet(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands in for Ray's."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(ray_watchdog, "watched_processes", lambda: {"raylet": process.pid})
    yield process
    process.kill()
    process.wait()


def answering(watchdog: RayWatchdog, seconds: float) -> str | None:
    watchdog._answers += 1
    return watchdog.look(seconds)


def test_a_raylet_that_is_killed_or_frozen_is_not_waited_for(
    raylet: subprocess.Popen[bytes],
) -> None:
    watchdog = RayWatchdog(60.0, lambda cause: None)
    assert answering(watchdog, 1.0) is None
    os.kill(raylet.pid, signal.SIGSTOP)
    while ray_watchdog._state(raylet.pid) != "T":
        time.sleep(0.01)
    assert answering(watchdog, 29.0) is None
    assert answering(watchdog, 2.0) == "Ray's raylet was stopped (SIGSTOP) 31 s ago"
    os.kill(raylet.pid, signal.SIGCONT)
    while ray_watchdog._state(raylet.pid) == "T":
        time.sleep(0.01)
    assert answering(watchdog, 29.0) is None
    raylet.kill()
    while ray_watchdog._state(raylet.pid) != "Z":
        time.sleep(0.01)
    assert "raylet (process" in str(answering(watchdog, 0.1))


def test_a_control_service_that_is_silent_is_not_waited_for(
    raylet: subprocess.Popen[bytes],
) -> None:
    watchdog = RayWatchdog(60.0, lambda cause: None)
    assert answering(watchdog, 100.0) is None  # it answers, however late anybody looks
    assert watchdog.look(64.0) is None
    assert watchdog.look(2.0) == "Ray's GCS did not answer for 60 s (--ray-timeout)"
    watchdog._node_is_dead = True
    assert "did not answer Ray's health checks" in str(answering(watchdog, 0.1))


def test_the_raylet_of_a_cluster_that_was_joined_is_watched_even_when_it_is_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray._private.worker

    listen = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(9); print(flush=True); s.accept()"
    path = tmp_path / "raylet"
    process = subprocess.Popen([sys.executable, "-c", listen, path], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        for name, found in ((str(path), {"raylet": process.pid}), (str(tmp_path / "none"), {})):
            node = SimpleNamespace(all_processes={}, raylet_socket_name=name)
            monkeypatch.setattr(ray._private.worker, "_global_node", node)
            assert ray_watchdog.watched_processes() == found
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("code", [-9, -11, 1])
def test_the_end_of_a_driver_has_a_cause(code: int) -> None:
    assert DriverEnd(code, {}).cause


def test_ray_is_not_blamed_for_a_driver_that_ended_before_the_job_began() -> None:
    assert "Ray" not in DriverEnd(1, {}).cause
    assert "Ray ended the driver" in DriverEnd(1, {"run_dir": "runs/a"}).cause
