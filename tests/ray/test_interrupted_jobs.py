"""A job that is interrupted keeps its weights, says how to go on, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from plugin.observe.run_record import read_run
from tests.ray.casualties import logged_steps, workers

pytestmark = [pytest.mark.hostile, pytest.mark.slow, pytest.mark.timeout(900)]

SIZES = shlex.split(
    "--num-rollouts 100000 --rollout-batch-size 4 --n-samples-per-prompt 4 --max-response-length 6 "
    "--save-at-end"
)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """TMPDIR of a job; short, because Ray has sockets there."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


def start(run_dir: Path, temporary: Path, *flags: str) -> subprocess.Popen[str]:
    """A job in a session of its own, whose process group gets the signals as from a terminal."""
    command = [sys.executable, "-m", "plugin", "train", "--run-dir", str(run_dir), *SIZES, *flags]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )


def wait_for_steps(job: subprocess.Popen[str], run_dir: Path, steps: int) -> None:
    while logged_steps(run_dir / "metrics.jsonl") < steps:
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.02)


def test_ctrl_c_saves_the_last_whole_rollout_and_the_printed_commands_work(
    tmp_path: Path, temporary: Path
) -> None:
    run_dir = tmp_path / "a run"
    job = start(run_dir, temporary)
    wait_for_steps(job, run_dir, 3)
    os.killpg(job.pid, signal.SIGINT)
    output = job.communicate(timeout=120)[0]
    assert job.returncode == 130, output
    last = read_run(run_dir).steps[-1]["step"]
    assert (run_dir / "checkpoints" / "latest").read_text().strip() == f"step_{last:07d}"
    left = [path for path in temporary.rglob("*") if not path.is_symlink() and path.is_file()]
    assert not [path for path in left if "ray_current_cluster" not in path.name]
    assert not list(temporary.glob("megatron_tis_*")) + list(temporary.glob("ray/session_2*"))

    export = shlex.split(re.findall(r"export: megatron-tis (.*)", output)[0])
    subprocess.run([sys.executable, "-m", "plugin", *export], check=True, timeout=300)
    assert (Path(export[-1]) / "config.json").exists()

    resume = shlex.split(re.findall(r"go on: +megatron-tis (.*)", output)[0])
    total = ["--num-rollouts", str(last + 2)]
    done = subprocess.run(
        [sys.executable, "-m", "plugin", *resume, *total],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert f"goes on after rollout {last} of {last + 2}" in done.stdout
    assert [step["step"] for step in read_run(run_dir).steps] == list(range(1, last + 3))


def test_a_second_ctrl_c_ends_at_once_and_still_prints_the_summary(
    tmp_path: Path, temporary: Path
) -> None:
    run_dir = tmp_path / "run"
    job = start(run_dir, temporary)
    wait_for_steps(job, run_dir, 3)
    for _ in range(4):
        os.killpg(job.pid, signal.SIGINT)
        time.sleep(0.3)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 130, output
    assert re.search(r"reward .* steps; report:", output), output


def test_an_engine_that_is_stopped_does_not_outlive_a_driver_that_is_killed(
    tmp_path: Path, temporary: Path
) -> None:
    run_dir = tmp_path / "run"
    job = start(run_dir, temporary)
    wait_for_steps(job, run_dir, 2)
    [engine] = workers("EngineActor", job.pid)
    engine.suspend()
    psutil.Process(job.pid).children()[0].kill()
    assert "the driver was killed" in job.communicate(timeout=120)[0]
    assert psutil.wait_procs([engine], timeout=30)[1] == []


def test_a_raylet_that_freezes_on_a_cluster_ends_the_job_within_its_deadline(
    tmp_path: Path, temporary: Path
) -> None:
    from ray.cluster_utils import Cluster

    cluster, run_dir = Cluster(), tmp_path / "run"
    raylet = None
    try:
        node = cluster.add_node(num_cpus=3, include_dashboard=False)
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        job = start(run_dir, temporary, "--address", cluster.address, "--ray-timeout", "20")
        wait_for_steps(job, run_dir, 2)
        raylet.suspend()
        began = time.monotonic()
        output = job.communicate(timeout=120)[0]
        assert time.monotonic() - began < 30
        assert job.returncode == 1 and "Ray's raylet was stopped" in output.splitlines()[-1], output
    finally:
        if raylet is not None:
            raylet.resume()
        cluster.shutdown()


@pytest.mark.parametrize(
    ("process", "how", "cause"),
    [
        ("raylet", signal.SIGKILL, "raylet"),
        ("gcs_server", signal.SIGKILL, "Ray's GCS (process"),
        ("raylet", signal.SIGSTOP, "Ray's raylet was stopped"),
        ("gcs_server", signal.SIGSTOP, "Ray's GCS was stopped"),
    ],
)
def test_a_ray_that_dies_or_freezes_does_not_hold_the_job_or_keep_it_from_saying_how_to_go_on(
    tmp_path: Path, temporary: Path, process: str, how: int, cause: str
) -> None:
    run_dir = tmp_path / "run"
    job = start(run_dir, temporary, "--save-interval", "1", "--ray-timeout", "10")
    wait_for_steps(job, run_dir, 4)  # saves are written in the background
    [target] = [p for p in psutil.Process(job.pid).children(recursive=True) if p.name() == process]
    target.send_signal(how)
    output = job.communicate(timeout=120)[0]
    assert job.returncode == 1, output
    errors = [line for line in output.splitlines() if "error" in line.lower()]
    assert errors == [output.splitlines()[-1]] and cause in errors[0], output
    assert re.search(r"reward .* steps; report:", output), output
    assert (run_dir / "report.html").stat().st_mtime >= (run_dir / "config.yaml").stat().st_mtime
    assert re.search(r"go on: +megatron-tis train .* --resume", output), output
