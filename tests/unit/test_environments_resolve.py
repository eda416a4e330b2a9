"""Every documented environment resolves with the versions it is documented with; nothing in it is replaced.

uv reads the metadata of packages from pip's index and downloads none of them: `make test-environments`.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not Path(sys.executable).with_name("uv").exists(),
        reason="uv is not installed here; make test-environments has it",
    ),
]


def lock_gpu() -> Any:
    spec = importlib.util.spec_from_file_location("lock_gpu", REQUIREMENTS / "lock_gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def torch_of(target: str) -> str:
    """The torch that a target of the Makefile installs."""
    text = (ROOT / "Makefile").read_text()
    [default] = re.findall(r"^TORCH \?= (\S+)", text, re.M)
    recipe = text.partition(f"\n{target}/ready:")[2].partition("\n\n")[0]
    [found] = re.findall(r"torch==(\S+)", recipe)
    return f"torch=={default if found == '$(TORCH)' else found}"


def extras(*names: str) -> list[str]:
    """What `pip install 'megatron-tis[...]'` asks for."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    arguments = {
        keyword.arg: keyword.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
    }
    groups = ast.literal_eval(arguments["extras_require"])
    return [
        *ast.literal_eval(arguments["install_requires"]),
        *(x for name in names for x in groups[name]),
    ]


@pytest.mark.parametrize(
    ("target", "files", "python"),
    [
        (".venv", ("cpu",), "3.11.7"),
        (".venv", ("cpu",), "3.12"),
        (".venv-gpu", ("gpu-vllm", "gpu"), "3.11.7"),
        (".venv-gpu", ("gpu-vllm", "gpu"), "3.12"),
        (".venv-mcore-latest", ("mcore-latest",), "3.12"),
    ],
)
def test_an_environment_has_the_versions_of_its_files_and_no_line_replaces_another(
    target: str, files: tuple[str, ...], python: str
) -> None:
    lock = lock_gpu()
    pins = [
        torch_of(target),
        *(pin for file in files for pin in lock.pins_of(REQUIREMENTS / f"{file}.txt")),
    ]
    found = {Requirement(pin).name: pin for pin in lock.resolve(pins, python)}
    for pin in map(Requirement, pins):
        [version] = pin.specifier
        name = re.sub(r"[-_.]+", "-", pin.name).lower()
        assert found[name] == f"{name}=={version.version}"
    # What is left open is needed by Transformer Engine and flash-attn alone, which no other line asks for.
    if "gpu" in files:
        of_built = lock.resolve([torch_of(target), *lock.pins_of(REQUIREMENTS / "gpu.txt")], python)
        named = {re.sub(r"[-_.]+", "-", Requirement(pin).name).lower() for pin in pins}
        assert set(found) - named <= {Requirement(pin).name for pin in of_built}


def test_the_extras_with_vllm_keep_the_torch_that_transformer_engine_is_built_for() -> None:
    wanted = extras("megatron", "job", "math", "gpu", "vllm")
    found = lock_gpu().resolve(wanted, "3.12")
    assert torch_of(".venv-gpu") in found
    assert any(pin.startswith("vllm==0.32.") for pin in found)


def test_sglang_as_the_documentation_installs_it_keeps_that_torch() -> None:
    page = (ROOT / "docs" / "vllm_and_sglang.md").read_text()
    [wanted] = re.findall(r"^pip install '?(sglang[^'\s]*)", page, re.M)
    found = lock_gpu().resolve([wanted, *extras("megatron", "job", "gpu")], "3.12")
    assert torch_of(".venv-gpu") in found
