"""Writes .github/workflows from the table in `tests/suites.py`: `python -m tests.write_workflows`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.suites import (
    CPU_SUITES,
    GPU_IMAGE,
    GPU_PYTHON,
    GPU_SUITES,
    NIGHTLY_SUITES,
    ROOT,
    Suite,
)

DIRECTORY = ROOT / ".github" / "workflows"
HEADER = "# Written by `python -m tests.write_workflows` from tests/suites.py; edit that table instead.\n"


def cpu_job(suite: Suite, *pythons: str) -> dict[str, Any]:
    """A job on a hosted runner, with the pinned environment that `make venv` builds.

    pythons: further ones that the suite needs; the last one set up is the default
    """
    versions = "\n".join((*pythons, "3.11"))
    return {
        "runs-on": "ubuntu-24.04",
        "timeout-minutes": suite.minutes,
        "steps": [
            {"uses": "actions/checkout@v4"},
            {"uses": "actions/setup-python@v5", "with": {"python-version": versions}},
            {"run": "make venv"},
            {"run": suite.command},
        ],
    }


def gpu_job(suite: Suite) -> dict[str, Any]:
    """A job on a self-hosted runner with enough GPUs: nightly, by hand, or on the label `run-gpu`."""
    python = f"python{GPU_PYTHON}"
    packages = ("git", "make", f"{python}-venv", f"{python}-dev")
    labeled = "contains(github.event.pull_request.labels.*.name, 'run-gpu')"
    return {
        "if": f"github.event_name != 'pull_request' || {labeled}",
        "runs-on": ["self-hosted", "linux", f"gpu-{suite.num_gpus}"],
        "container": {"image": GPU_IMAGE, "options": "--gpus all --ipc=host"},
        "timeout-minutes": suite.minutes,
        "steps": [
            {"uses": "actions/checkout@v4"},
            {"run": f"apt-get update && apt-get install -y {' '.join(packages)}"},
            {"run": f"make venv-gpu PYTHON={python}"},
            {"run": suite.command},
        ],
    }


def workflows() -> dict[str, str]:
    """File name -> content."""
    cpu = {
        "name": "CPU",
        "on": {"push": {"branches": ["main"]}, "pull_request": {}},
        "permissions": {"contents": "read"},
        "jobs": {suite.name: cpu_job(suite) for suite in CPU_SUITES},
    }
    nightly = {
        "name": "Nightly",
        "on": {
            "schedule": [{"cron": "0 1 * * *"}],
            # A change of the pins or of what installs them is tried at once.
            "pull_request": {"paths": ["requirements/**", "Makefile", "setup.py"]},
            "workflow_dispatch": {},
        },
        "permissions": {"contents": "read"},
        "jobs": {suite.name: cpu_job(suite, GPU_PYTHON) for suite in NIGHTLY_SUITES},
    }
    gpu = {
        "name": "GPU",
        "on": {
            "schedule": [{"cron": "0 2 * * *"}],
            "pull_request": {"types": ["labeled"]},
            "workflow_dispatch": {},
        },
        "permissions": {"contents": "read"},
        "jobs": {suite.name: gpu_job(suite) for suite in GPU_SUITES},
    }
    return {
        f"{name}.yml": HEADER + yaml.safe_dump(content, sort_keys=False, width=100)
        for name, content in (("cpu", cpu), ("nightly", nightly), ("gpu", gpu))
    }


def main() -> None:
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for name, content in workflows().items():
        Path(DIRECTORY, name).write_text(content)


if __name__ == "__main__":
    main()
