"""The suite table, the workflows written from it, and the GPU suites on a machine without GPUs."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.run_gpu import plan
from tests.suites import (
    CPU_SUITES,
    GPU_COUNTS,
    GPU_SUITES,
    ROOT,
    declared_gpus,
    files_of,
    gpu_files,
)
from tests.write_workflows import DIRECTORY, workflows


@pytest.mark.parametrize("name", ["cpu.yml", "gpu.yml"])
def test_the_workflows_are_those_of_the_table(name: str) -> None:
    fix = "run `python -m tests.write_workflows`"
    assert (DIRECTORY / name).read_text() == workflows()[name], fix


def test_every_suite_is_a_job() -> None:
    assert list(yaml.safe_load(workflows()["cpu.yml"])["jobs"]) == [s.name for s in CPU_SUITES]
    jobs = yaml.safe_load(workflows()["gpu.yml"])["jobs"]
    assert list(jobs) == [s.name for s in GPU_SUITES]
    for job, suite in zip(jobs.values(), GPU_SUITES, strict=True):
        assert job["runs-on"][-1] == f"gpu-{suite.num_gpus}" and ":" in job["container"]["image"]


@pytest.mark.parametrize("file", gpu_files(), ids=lambda file: file.name)
def test_every_gpu_file_declares_a_number_of_gpus_that_has_a_suite(file: Path) -> None:
    assert declared_gpus(file) in GPU_COUNTS


def test_no_gpu_suite_is_empty() -> None:
    assert all(files_of(suite) for suite in GPU_SUITES)


def test_what_a_machine_cannot_hold_is_named_with_the_reason() -> None:
    runnable, skipped = plan(GPU_SUITES, 2)
    assert [suite.name for suite in runnable] == ["gpu-1", "gpu-2"]
    assert len(skipped) == len(files_of(GPU_SUITES[-1]))
    assert (
        "skipped test_layout_equality_gpu.py: gpu-4 needs 4 GPUs and this machine has 2" in skipped
    )


@pytest.mark.slow  # the default run collects them too
def test_the_gpu_tests_import_and_collect_without_a_gpu() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/gpu"]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=240, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    for shared in ("test_layout_equality_gpu.py", "test_router_replay_gpu.py"):
        assert shared in result.stdout


def test_no_two_test_files_have_one_name() -> None:
    # `make test` collects all suites in one process, which imports a file by its bare name.
    names = Counter(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
