"""What a GPU environment installs fits together: pins, Megatron-Core's metadata, the extra, workflow and docs."""

from __future__ import annotations

import ast
import importlib.metadata
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.suites import GPU_IMAGE, GPU_PYTHON, ROOT
from tests.write_workflows import workflows

REQUIREMENTS = ROOT / "requirements"


def pinned(file: Path) -> dict[str, str]:
    """Name -> version of the lines with `==`."""
    lines = [line.split("#")[0].strip("\\ ") for line in file.read_text().splitlines()]
    found = [Requirement(line) for line in lines if "==" in line]
    return {item.name: next(iter(item.specifier)).version for item in found}


def extras(name: str) -> dict[str, Requirement]:
    """Name -> requirement of `pip install megatron-tis[...]`."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    found = next(
        ast.literal_eval(keyword.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "extras_require"
    )
    return {item.name: item for item in map(Requirement, found[name])}


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
    ours = extras("gpu")["transformer-engine"].specifier
    for version in ("2.8.0", "2.9.0", "2.11.0", "2.12.0"):
        assert ours.contains(version) == engine.specifier.contains(version, prereleases=True)


def test_the_extra_takes_what_the_environment_installs() -> None:
    extra = extras("gpu")
    for name, version in pinned(REQUIREMENTS / "gpu.txt").items():
        assert extra[name].specifier.contains(version), name


def test_the_workflow_builds_that_environment_and_runs_in_it() -> None:
    workflow = workflows()["gpu.yml"]
    assert f"make venv-gpu PYTHON=python{GPU_PYTHON}" in workflow
    assert ".venv-gpu/bin/python -m tests.run_gpu" in workflow and GPU_IMAGE in workflow
    # Transformer Engine's package for CUDA 13, as Megatron-Core asks for it
    assert "cuda:13." in GPU_IMAGE and "-devel-" in GPU_IMAGE


def test_the_documentation_shows_the_versions_that_are_installed() -> None:
    pins, others = pinned(REQUIREMENTS / "gpu.txt"), pinned(REQUIREMENTS / "gpu-vllm.txt")
    [torch] = re.findall(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    page = (ROOT / "docs" / "testing.md").read_text()
    [row] = [line for line in page.splitlines() if "`make venv-gpu` |" in line]
    shown = [cell.strip() for cell in row.strip("|").split("|")]
    engines = [pins["transformer-engine"], pins["flash-attn"], others["vllm"]]
    assert shown == [others["megatron-core"], GPU_PYTHON, torch, *engines, "`make venv-gpu`"]


def test_vllm_is_of_the_range_of_its_extra_and_cannot_replace_torch() -> None:
    vllm = extras("vllm")["vllm"].specifier
    assert vllm.contains(pinned(REQUIREMENTS / "gpu-vllm.txt")["vllm"])
    assert not vllm.contains("0.33.0")  # which wants torch 2.14.0
    # vLLM 0.32 takes no newer transformers.
    assert Version(pinned(REQUIREMENTS / "gpu-vllm.txt")["transformers"]) < Version("5.20")


def test_the_environment_of_the_gpus_has_what_the_default_one_runs_with() -> None:
    """Where they differ, vLLM asks for it."""
    ours, theirs = pinned(REQUIREMENTS / "cpu.txt"), pinned(REQUIREMENTS / "gpu-vllm.txt")
    theirs = {name.lower().replace("_", "-"): version for name, version in theirs.items()}
    for name in ("megatron-core", "mbridge", "ray", "pytest", "safetensors", "pyarrow"):
        assert theirs[name] == ours[name], name


def test_the_recipe_shows_transformer_engine_cudnns_headers_and_names_flash_attns_architectures() -> (
    None
):
    recipe = (ROOT / "Makefile").read_text().partition("\n.venv-gpu/ready:")[2].partition("\n\n")[0]
    [build] = [
        line
        for line in recipe.replace("\\\n", " ").splitlines()
        if "gpu.txt" in line and "pip" in line
    ]
    assert "nvidia/cudnn/include" in build.partition("pip")[0] and "CPLUS_INCLUDE_PATH=" in build
    assert 'FLASH_ATTN_CUDA_ARCHS="$(CUDA_ARCHS)"' in build


def test_kernels_are_tested_with_the_triton_that_comes_with_torch() -> None:
    wanted = pinned(REQUIREMENTS / "gpu-vllm.txt")["triton"]
    for name in ("kernels", "te"):
        assert pinned(REQUIREMENTS / f"{name}.txt")["triton"] == wanted, name
