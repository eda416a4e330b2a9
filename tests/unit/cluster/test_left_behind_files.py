"""What a job writes for others is removed with it: by itself, or by the next one if it was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from plugin.cluster.directory_lock import OwnedDirectory
from plugin.cluster.ray_cluster import remove_session
from plugin.logprobs.kernels import cpu_extension

pytestmark = pytest.mark.hostile


HOLDER = """
import sys, time
from pathlib import Path
from plugin.cluster.directory_lock import OwnedDirectory
mine = OwnedDirectory(Path(sys.argv[1]), "megatron_tis_", "--rollout-weights-dir")
(mine.path / "model.safetensors").write_bytes(bytes(1000))
print(mine.path.name, flush=True)
time.sleep(60)
"""


def test_weights_of_a_killed_job_are_removed_by_the_next_and_those_of_a_living_one_are_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "somebody's").mkdir()
    (tmp_path / "megatron_tis_notes").mkdir()
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    names = [job.stdout.readline().strip() for job in jobs if job.stdout is not None]
    jobs[0].send_signal(signal.SIGKILL)
    jobs[0].wait()
    assert (tmp_path / names[0] / "model.safetensors").exists()
    mine = OwnedDirectory(tmp_path, "megatron_tis_", "--rollout-weights-dir")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"somebody's", "megatron_tis_notes", names[1], mine.path.name}
    mine.remove()
    assert not mine.path.exists()
    jobs[1].kill()
    jobs[1].wait()


AGENT = """
import sys, time
from pathlib import Path
directory = Path(sys.argv[1])
log = open(directory / "raylet.out", "a")
print("ready", flush=True)
while True:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "port").write_text("1")
    time.sleep(0.001)
"""
READER = """
import sys, time
log = open(sys.argv[1])
print("ready", flush=True)
time.sleep(60)
"""


def test_agents_of_a_private_ray_do_not_write_its_directory_anew(tmp_path: Path) -> None:
    session = tmp_path / "session_1" / "logs"
    session.mkdir(parents=True)
    (session / "raylet.out").touch()
    agent, reader = (
        subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
        for code, path in ((AGENT, session), (READER, session / "raylet.out"))
    )
    for process in (agent, reader):
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    remove_session(tmp_path / "session_1")
    assert agent.wait(10) == -signal.SIGKILL
    assert not list(tmp_path.iterdir())
    assert reader.poll() is None, "who reads a log is left alone"
    reader.kill()
    reader.wait()


def test_kernels_built_without_a_cache_leave_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "cache"
    blocked.write_text("a file where the cache directory should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def build(path: Path) -> Any:
        path.write_bytes(b"library")
        return path

    monkeypatch.setattr(cpu_extension, "_open_or_build", build)
    monkeypatch.setattr(cpu_extension, "_with_signatures", lambda path: path)
    assert cpu_extension.load_library.__wrapped__() is not None
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
