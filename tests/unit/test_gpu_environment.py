"""What a GPU environment installs fits together: pins, Megatron-Core's metadata, the extra, workflow and docs."""

from __future__ import annotations

import ast
import importlib.metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.suites import GPU_IMAGE, GPU_PYTHON, ROOT
from tests.write_workflows import workflows

REQUIREMENTS = ROOT / "requirements"


def pinned(file: Path) -> dict[str, str]:
    """Name -> version of the lines with `==`."""
    lines = [line.split("#")[0].strip("\\ ") for line in file.read_text().splitlines()]
    found = [Requirement(line) for line in lines if "==" in line]
    return {item.name: next(iter(item.specifier)).version for item in found}


def gpu_extra() -> dict[str, Requirement]:
    """Name -> requirement of `pip install megatron-tis[gpu]`."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    extras = next(
        ast.literal_eval(keyword.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "extras_require"
    )
    return {item.name: item for item in map(Requirement, extras["gpu"])}


def test_megatron_core_accepts_the_transformer_engine_that_is_installed_with_it() -> None:
    if (
        importlib.metadata.version("megatron-core")
        != pinned(REQUIREMENTS / "cpu.txt")["megatron-core"]
    ):
        pytest.skip("another Megatron-Core is installed")
    wanted = [Requirement(text) for text in importlib.metadata.requires("megatron-core") or ()]
    (engine,) = [item for item in wanted if item.name == "transformer-engine"]
    installed = pinned(REQUIREMENTS / "gpu.txt")["transformer-engine"]
    assert engine.specifier.contains(installed, prereleases=True)
    # The range of the extra is Megatron-Core's own: nothing outside of it is accepted.
    ours = gpu_extra()["transformer-engine"].specifier
    for version in ("2.8.0", "2.9.0", "2.11.0", "2.12.0"):
        assert ours.contains(version) == engine.specifier.contains(version, prereleases=True)


def test_the_extra_takes_what_the_environment_installs() -> None:
    extra = gpu_extra()
    for name, version in pinned(REQUIREMENTS / "gpu.txt").items():
        assert extra[name].specifier.contains(version), name


def test_the_workflow_builds_that_environment_and_runs_in_it() -> None:
    workflow = workflows()["gpu.yml"]
    assert f"make venv-gpu PYTHON=python{GPU_PYTHON}" in workflow
    assert ".venv-gpu/bin/python -m tests.run_gpu" in workflow and GPU_IMAGE in workflow
    # Transformer Engine's package for CUDA 13, as Megatron-Core asks for it
    assert "cuda:13." in GPU_IMAGE and "-devel-" in GPU_IMAGE


@pytest.mark.parametrize(
    ("gpu", "base", "target"),
    [
        ("gpu.txt", "cpu.txt", "venv-gpu"),
        ("gpu-mcore-latest.txt", "mcore-latest.txt", "venv-gpu-mcore-latest"),
    ],
)
def test_the_documentation_shows_the_versions_that_are_installed(
    gpu: str, base: str, target: str
) -> None:
    pins, core = pinned(REQUIREMENTS / gpu), pinned(REQUIREMENTS / base)["megatron-core"]
    page = (ROOT / "docs" / "testing.md").read_text()
    [row] = [line for line in page.splitlines() if f"`make {target}` |" in line]
    assert row.startswith(f"| {core} | {GPU_PYTHON} |")
    assert row.endswith(
        f"| {pins['transformer-engine']} | {pins['flash-attn']} | `make {target}` |"
    )
