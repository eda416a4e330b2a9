"""What the processes of a job have in their environment once they run: written down by a package that Python imports
at every start (`sitecustomize`), because the kernel shows only what a process was started with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SITE = """
import json, os, sys, threading, time

NAMES = ("SOCKET_IFNAME", "CUMEM", "MASTER_ADDR", "VLLM_HOST_IP")
ROLES = {{"ray::TrainerRank": "rank", "ray::EngineActor": "engine", "sglang.launch_server": "server"}}

def watch():
    while True:
        time.sleep(0.2)
        with open("/proc/self/cmdline", "rb") as file:
            command = file.read().replace(bytes(1), b" ").decode()
        for mark, role in ROLES.items():
            if mark in command:
                kept = {{k: v for k, v in list(os.environ.items()) if any(n in k for n in NAMES)}}
                path = os.path.join({directory!r}, f"{{role}}-{{os.getpid()}}.json")
                with open(path + ".new", "w") as file:
                    json.dump(dict(role=role, net=os.readlink("/proc/self/ns/net"), environment=kept), file)
                os.replace(path + ".new", path)

threading.Thread(target=watch, daemon=True).start()
"""


def install(packages: Path, directory: Path) -> Path:
    """Writes the package into `packages`, which belongs on PYTHONPATH; it writes to `directory`."""
    packages.mkdir(exist_ok=True)
    directory.mkdir()
    (packages / "sitecustomize.py").write_text(_SITE.format(directory=str(directory)))
    return packages


def exported(directory: Path) -> Iterator[dict[str, Any]]:
    """What each process wrote last."""
    for file in sorted(directory.glob("*.json")):
        yield json.loads(file.read_text())
