"""A job with an SGLang server of its own (a stand-in), which dies on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.ray.casualties import AfterSteps
from tests.unit.engines.servers.stand_in_sglang import install

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = str(Path(__file__).parents[2])


def starts(run_dir: Path) -> list[dict[str, int]]:
    """What every server of engine 0 said when it started."""
    lines = (run_dir / "engine_0.log").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_a_server_that_is_killed_is_replaced_and_none_is_left(tmp_path: Path) -> None:
    run_dir, packages = tmp_path / "run", install(tmp_path / "packages")
    path = os.pathsep.join((ROOT, str(packages)))
    flags = {
        "rollout-engine": "sglang",
        "sglang-args": "chunked_prefill_size=512",
        "num-rollouts": "6",
        "rollout-batch-size": "4",
    }
    command = [sys.executable, "-m", "plugin", "train", "--run-dir", str(run_dir)]
    for name, value in flags.items():
        command += [f"--{name}", value]

    def kill() -> None:
        os.kill(starts(run_dir)[0]["pid"], signal.SIGKILL)

    with AfterSteps(run_dir, 2, kill) as killed:
        done = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
        )
    assert killed.done and done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "engine 0 is replaced" in done.stdout
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["engine_restarts"] == 1
    # Both servers received the weights: the stand-in computes with them.
    assert done.stdout.count("computes with the trainer's weights") == 2, done.stdout
    assert all(line["train_rollout_logprob_abs_diff"] < 1e-5 for line in lines)
    servers = starts(run_dir)
    assert len(servers) == 2
    left = {s[kind] for s in servers for kind in ("pid", "child")}
    deadline = time.monotonic() + 20  # the guard of the last one outlives the job by a moment
    while any(map(psutil.pid_exists, left)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, left))
