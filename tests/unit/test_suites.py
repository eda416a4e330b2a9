"""The suite table, the workflows written from it, and the GPU suites on a machine without GPUs."""

from __future__ import annotations

import importlib.util
import re
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
    NIGHTLY_SUITES,
    ROOT,
    declared_gpus,
    files_of,
    gpu_files,
)
from tests.write_workflows import DIRECTORY, workflows


@pytest.mark.parametrize("name", ["cpu.yml", "nightly.yml", "gpu.yml"])
def test_the_workflows_are_those_of_the_table(name: str) -> None:
    fix = "run `python -m tests.write_workflows`"
    assert (DIRECTORY / name).read_text() == workflows()[name], fix


def test_every_suite_is_a_job() -> None:
    for file, suites in (("cpu.yml", CPU_SUITES), ("nightly.yml", NIGHTLY_SUITES)):
        assert list(yaml.safe_load(workflows()[file])["jobs"]) == [s.name for s in suites]
    jobs = yaml.safe_load(workflows()["gpu.yml"])["jobs"]
    assert list(jobs) == [s.name for s in GPU_SUITES]
    for job, suite in zip(jobs.values(), GPU_SUITES, strict=True):
        assert job["runs-on"][-1] == f"gpu-{suite.num_gpus}" and ":" in job["container"]["image"]


def test_make_test_all_runs_every_suite_of_the_nightly_workflow() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile.partition("\ntest-all:")[2].partition("\n\n")[0]
    wanted = {suite.command.removeprefix("make ") for suite in NIGHTLY_SUITES} - {"audit"}
    assert wanted <= set(recipe.split())


def test_every_pin_of_the_cpu_environment_has_a_hash() -> None:
    text = (ROOT / "requirements" / "cpu.txt").read_text().replace("\\\n", " ")
    pins = [line.split() for line in text.splitlines() if not line.startswith("#")]
    assert len(pins) > 100
    for pin, *hashes in pins:
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", h) for h in hashes), pin


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("a_b-1.0-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", True),
        ("a_b-1.0-cp39-abi3-manylinux_2_28_aarch64.whl", True),
        ("a_b-1.0-py2.py3-none-any.whl", True),
        ("a_b-1.0-1-cp312-cp312-macosx_11_0_arm64.whl", True),
        ("a_b-1.0.tar.gz", True),
        ("a_b-1.0-cp314-cp314-manylinux_2_28_x86_64.whl", False),
        ("a_b-1.0-cp313-cp313t-manylinux_2_28_x86_64.whl", False),
        ("a_b-1.0-cp311-cp311-win_amd64.whl", False),
        ("a_b-1.0-cp311-cp311-musllinux_1_2_x86_64.whl", False),
    ],
)
def test_the_lock_has_the_files_that_linux_and_macos_may_install(file: str, wanted: bool) -> None:
    spec = importlib.util.spec_from_file_location("lock", ROOT / "requirements" / "lock.py")
    assert spec is not None and spec.loader is not None
    lock = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lock)
    assert lock.is_wanted(file) == wanted
    assert lock.is_of_version(file, "a-b", "1.0")
    assert not lock.is_of_version(file, "a-b", "1")
    assert not lock.is_of_version(file, "b", "1.0")


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
