"""Two machines on one: network namespaces with addresses of their own, a Ray node in each, and a link to cut.

Needs root and `ip` (iproute2). The file system is shared, as on a cluster with a network file system. As on a stock
Debian, each machine's own name is 127.0.1.1 to it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Of the first namespace; Ray's head listens on it.
PORT = 6379
_START_SECONDS = 120.0


def why_not() -> str | None:
    """Why this machine has no namespaces for us; None if it has."""
    if shutil.which("ip") is None:
        return "needs ip (iproute2)"
    if os.geteuid() != 0:
        return "needs root"
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return None if done.returncode == 0 else "the kernel permits no network namespaces here"


class Network:
    """The namespaces `names` with `addresses`, joined by one link."""

    def __init__(self, directory: Path) -> None:
        tag = f"{os.getpid() % 0xFFFF:04x}"
        self.names = [f"mtis-{tag}-{side}" for side in "ab"]
        #: The interface of each machine.
        self.links = [f"mt{tag}{side}" for side in "ab"]
        #: Of a range that is kept for benchmarks of networks, and so is nobody's own.
        self.addresses = ["198.18.77.1", "198.18.77.2"]
        self.directory = directory
        first, second = self.links
        for name in self.names:
            _ip("netns", "add", name)
            # What `ip netns exec` shows instead of /etc/hosts.
            _own_files(name).mkdir(parents=True)
            names = f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n"
            (_own_files(name) / "hosts").write_text(names)
        _ip("link", "add", first, "netns", self.names[0], "type", "veth", "peer", second, "netns", self.names[1])  # fmt: skip
        for name, link, address in zip(self.names, self.links, self.addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    @property
    def head(self) -> str:
        """What `--address` takes."""
        return f"{self.addresses[0]}:{PORT}"

    def start(self, side: int, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command on a machine; its output goes to a file named after it."""
        log = self.directory / f"{self.names[side]}.log"
        with log.open("a") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.names[side], *command],
                cwd=ROOT,
                env=_environment(environment),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
            )

    def run(
        self, side: int, *command: str, timeout: float = 300, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine to its end."""
        return subprocess.run(
            ["ip", "netns", "exec", self.names[side], *command],
            cwd=ROOT,
            env=_environment(environment),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def start_ray(self, cpus: tuple[int, int] = (3, 3), **environment: str) -> None:
        """Start Ray's head on the first machine and a node on the second."""
        ray = [str(Path(sys.executable).with_name("ray")), "start", "--block"]
        if not Path(ray[0]).exists():
            ray[:1] = [sys.executable, "-m", "ray.scripts.scripts"]
        head = ("--head", "--port", str(PORT), "--include-dashboard=false")
        for side, role in enumerate((head, ("--address", self.head))):
            where = ("--node-ip-address", self.addresses[side], "--num-cpus", str(cpus[side]))
            started = self.start(side, *ray, *role, *where, **environment)
            self._wait_for(side, started)

    def _wait_for(self, side: int, started: subprocess.Popen[str]) -> None:
        log = self.directory / f"{self.names[side]}.log"
        deadline = time.monotonic() + _START_SECONDS
        while "Ray runtime started" not in log.read_text():
            if started.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"Ray did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.1)

    def cut(self) -> None:
        """Take the link down: packets are lost, and nobody is told."""
        _ip("-n", self.names[1], "link", "set", self.links[1], "down")

    def mend(self) -> None:
        _ip("-n", self.names[1], "link", "set", self.links[1], "up")

    def processes(self, side: int) -> list[int]:
        """The processes of a machine."""
        return [int(process) for process in _ip("netns", "pids", self.names[side]).split()]

    def listeners(self, side: int) -> list[str]:
        """What listens on a machine, one `address:port process` each."""
        found = self.run(side, "ss", "-Htlnp").stdout
        return [
            f"{row.split()[3]} {row.partition('users:')[2].strip()}"
            for row in found.splitlines()
            if len(row.split()) > 3
        ]

    def close(self) -> None:
        """End everything that runs on the machines, and remove them."""
        for _ in range(50):
            left = [process for side in (0, 1) for process in self.processes(side)]
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            if not left:
                break
            time.sleep(0.1)
        for name in self.names:
            _ip("netns", "delete", name)
            shutil.rmtree(_own_files(name))


@contextlib.contextmanager
def two_machines(directory: Path) -> Iterator[Network]:
    """A network for the length of the body."""
    network = Network(directory)
    try:
        yield network
    finally:
        network.close()


def _own_files(name: str) -> Path:
    return Path("/etc/netns", name)


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    # Those of the suite keep Ray on loopback.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return inherited | {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Else Ray takes the token that an earlier one may have left in the home directory.
        "RAY_AUTH_MODE": "disabled",
        "RAY_worker_niceness": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout
