"""What ranks, engines and servers of each kind of job export to gloo and NCCL, on two machines with addresses of their own
(network namespaces) whose names are 127.0.1.1 to themselves."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ray.exported_environment import exported
from tests.ray.exported_environment import install as install_site
from tests.ray.network import ROOT, Network, two_machines, why_not
from tests.unit.engines.servers.stand_in_sglang import install as install_sglang

REASON = why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]

GLOO, NCCL, CUMEM = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_CUMEM_ENABLE"
SIZES = (
    "--num-rollouts",
    "1",
    "--rollout-batch-size",
    "4",
    "--n-samples-per-prompt",
    "4",
    "--max-response-length",
    "6",
)
#: What stands in the table for the interface of the machine that a process runs on.
OWN = "own"
Exports = tuple[str, int, dict[str, str]]
#: Role, machine and variables of every process, by kind of job. A machine's rank comes before its engine.
TABLE: dict[str, tuple[tuple[str, ...], bool, list[Exports]]] = {
    "private Ray, one machine": (
        ("--tensor-model-parallel-size", "2"),
        False,
        [("engine", 0, {GLOO: "lo", NCCL: "=lo"})] + [("rank", 0, {GLOO: "lo", NCCL: "=lo"})] * 2,
    ),
    "private Ray, a server of the job's own": (
        ("--rollout-engine", "sglang", "--sglang-args", "chunked_prefill_size=512"),
        False,
        # The stand-in server sets an interface itself.
        [(role, 0, {GLOO: "lo", NCCL: "=lo", CUMEM: "0"}) for role in ("engine", "rank", "server")],
    ),
    "trainer on one node, engine on another": (
        (
            "--num-gpus-per-node",
            "2",
            "--tensor-model-parallel-size",
            "2",
            "--weight-sync",
            "broadcast",
        ),
        True,
        [("engine", 1, {GLOO: OWN, NCCL: OWN})] + [("rank", 0, {GLOO: "lo", NCCL: OWN})] * 2,
    ),
    "trainer on two nodes": (
        ("--num-nodes", "2", "--weight-sync", "broadcast"),
        True,
        [("engine", 0, {GLOO: OWN, NCCL: OWN})]
        + [("rank", side, {GLOO: OWN, NCCL: OWN}) for side in (0, 1)],
    ),
    "colocated on two nodes": (
        ("--num-nodes", "2", "--colocate", "--num-rollout-engines", "2"),
        True,
        [(role, side, {GLOO: OWN, NCCL: OWN}) for role in ("engine", "rank") for side in (0, 1)],
    ),
}


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    directory = tmp_path_factory.mktemp("machines")
    packages = install_site(directory / "packages", directory / "exported")
    install_sglang(packages)
    with two_machines(directory) as found:
        found.start_ray((2, 1), PYTHONPATH=os.pathsep.join((str(ROOT), str(packages))))
        yield found


@pytest.mark.parametrize("kind", TABLE)
def test_every_process_of_a_job_names_the_interfaces_of_the_table(
    kind: str, network: Network, tmp_path: Path
) -> None:
    flags, joins, expected = TABLE[kind]
    written = network.directory / "exported"
    for file in written.glob("*.json"):
        file.unlink()
    address = ("--address", network.head) if joins else ()
    command = (
        sys.executable,
        "-m",
        "plugin",
        "train",
        *SIZES,
        *flags,
        *address,
        "--run-dir",
        str(tmp_path / "run"),
    )
    path = os.pathsep.join((str(ROOT), str(network.directory / "packages")))
    done = network.run(0, *command, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    machines = [
        network.run(side, "readlink", "/proc/self/ns/net").stdout.strip() for side in (0, 1)
    ]
    assert sorted(map(row(network, machines), exported(written)), key=repr) == sorted(
        expected, key=repr
    )


def row(network: Network, machines: list[str]) -> Any:
    """A process in the form of the table."""

    def of(process: dict[str, Any]) -> Exports:
        side = machines.index(process["net"])
        own = {
            # Behind an equals sign NCCL takes no longer names.
            name: OWN if value == ("=" * (name == NCCL)) + network.links[side] else value
            for name, value in process["environment"].items()
        }
        return process["role"], side, own

    return of
