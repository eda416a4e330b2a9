"""Requirement files, Makefile, workflow, extra and docs agree with the table of GPU pins."""

from __future__ import annotations

import ast
import importlib.metadata
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.suites import GPU_IMAGE, GPU_PINS, ROOT, GpuPins
from tests.write_workflows import workflows

each = pytest.mark.parametrize("pins", GPU_PINS, ids=lambda pins: pins.megatron_core)


def pinned(file: Path) -> dict[str, str]:
    """Name -> version of the lines with `==`."""
    lines = [line.split("#")[0].strip() for line in file.read_text().splitlines()]
    found = [Requirement(line) for line in lines if "==" in line]
    return {item.name: next(iter(item.specifier)).version for item in found}


@each
def test_a_requirement_file_has_the_pins_of_the_table(pins: GpuPins) -> None:
    assert pinned(ROOT / pins.requirements) == {
        "transformer-engine": pins.transformer_engine,
        "flash-attn": pins.flash_attn,
    }


@each
def test_the_make_target_installs_them_on_the_torch_and_megatron_core_of_the_table(
    pins: GpuPins,
) -> None:
    makefile = (ROOT / "Makefile").read_text()
    call = re.search(
        rf"^\.{pins.target}/ready:.*\n\t\$\(call gpu_environment,(.*)\)$", makefile, re.M
    )
    assert call, f"make {pins.target}"
    _, directory, torch, base, own = call.group(1).split(",")
    default = re.search(r"^TORCH \?= (\S+)$", makefile, re.M)
    assert default and torch.replace("$(TORCH)", default.group(1)) == pins.torch
    assert directory == f".{pins.target}" and own == pins.requirements
    assert pinned(ROOT / base)["megatron-core"] == pins.megatron_core
    assert "--no-build-isolation" in makefile


def test_megatron_core_accepts_the_transformer_engine_that_is_installed_with_it() -> None:
    pins = GPU_PINS[0]
    if importlib.metadata.version("megatron-core") != pins.megatron_core:
        pytest.skip("another Megatron-Core is installed")
    wanted = [Requirement(text) for text in importlib.metadata.requires("megatron-core") or ()]
    (engine,) = [item for item in wanted if item.name == "transformer-engine"]
    assert engine.specifier.contains(pins.transformer_engine, prereleases=True)
    # The range of the extra is Megatron-Core's own: nothing outside of it is accepted.
    for version in ("2.8.0", "2.9.0", "2.11.0", "2.12.0"):
        ours = SpecifierSet(pins.accepted).contains(version)
        assert ours == engine.specifier.contains(version, prereleases=True), version


def test_the_extra_takes_what_the_table_accepts() -> None:
    tree = ast.parse((ROOT / "setup.py").read_text())
    extras = next(
        ast.literal_eval(keyword.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "extras_require"
    )
    engine, flash = map(Requirement, extras["gpu"])
    assert engine.specifier == SpecifierSet(GPU_PINS[0].accepted)
    assert flash.specifier.contains(GPU_PINS[0].flash_attn)


def test_the_workflow_builds_that_environment_and_runs_in_it() -> None:
    workflow = workflows()["gpu.yml"]
    assert f"make venv-gpu PYTHON=python{GPU_PINS[0].python}" in workflow
    assert ".venv-gpu/bin/python -m tests.run_gpu" in workflow and GPU_IMAGE in workflow
    # Transformer Engine's package for CUDA 13, as Megatron-Core asks for it
    assert "cuda:13." in GPU_IMAGE and "-devel-" in GPU_IMAGE


@each
def test_the_documentation_shows_the_table(pins: GpuPins) -> None:
    row = f"| {pins.megatron_core} | {pins.python} | {pins.torch} | {pins.transformer_engine} | {pins.flash_attn} | `make {pins.target}` |"
    assert row in (ROOT / "docs" / "testing.md").read_text()
