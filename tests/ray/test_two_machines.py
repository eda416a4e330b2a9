"""A job over two machines with addresses of their own (network namespaces): who listens, who may join, a cut link."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray.network import Network, two_machines, why_not

REASON = why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5" * 64}
#: Processes of Ray that listen on every interface, whatever Ray is told; docs/security.md says so.
OF_RAY = re.compile(r"gcs_server|raylet|ray::DashboardA|ray::RuntimeEnv|ray::IDLE")


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with two_machines(tmp_path) as found:
        found.start_ray(**TOKEN)
        yield found


def train(network: Network, run_dir: Path, *more: str) -> list[str]:
    sizes = ("--num-nodes", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4")
    command = (sys.executable, "-m", "plugin", "train", "--address", network.head, *sizes)
    return [*command, "--max-response-length", "6", "--run-dir", str(run_dir), *more]


def wait_for_steps(run_dir: Path, steps: int, seconds: float = 200) -> None:
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + seconds
    while not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
        assert time.monotonic() < deadline, "the job did not get that far"
        time.sleep(0.1)


def test_a_job_trains_over_two_machines_and_listens_only_where_its_nodes_meet(
    network: Network, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    more = ("--num-rollouts", "60", "--weight-sync", "broadcast", "--start-timeout", "200")
    job = network.start(0, *train(network, run_dir, *more), **TOKEN)
    wait_for_steps(run_dir, 3)
    ours = [
        line.split()
        for side in (0, 1)
        for line in network.listeners(side)
        # The ports at which Ray's workers listen for each other are Ray's own.
        if not OF_RAY.search(line) and not line.startswith(("*:", "0.0.0.0:", "[::ffff:"))
    ]
    assert {address.rpartition(":")[0] for address, *_ in ours} == set(network.addresses)
    assert any("TrainerRan" in where for _, where, *_ in ours)

    stranger = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False); print('joined')"
    uninvited = network.run(
        1,
        *(sys.executable, "-c", stranger, network.head),
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN="6" * 64,
    )
    assert uninvited.returncode != 0 and "joined" not in uninvited.stdout

    assert job.wait(timeout=300) == 0, (tmp_path / f"{network.names[0]}.log").read_text()[-3000:]
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert [line["step"] for line in steps] == list(range(1, 61))
    assert all(line["train_rollout_logprob_abs_diff"] < 1e-5 for line in steps)


def test_a_cut_link_ends_the_job_with_the_lost_ranks_name(network: Network, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    more = ("--num-rollouts", "100000", "--step-timeout", "60", "--start-timeout", "200")
    job = network.start(0, *train(network, run_dir, *more), **TOKEN)
    wait_for_steps(run_dir, 3)
    network.cut()
    assert job.wait(timeout=300) == 1
    told = (tmp_path / f"{network.names[0]}.log").read_text()
    [error] = [line for line in told.splitlines() if line.startswith("error: ")]
    assert network.addresses[1] in error, error
    assert "--save-interval" in told and "report" in told
