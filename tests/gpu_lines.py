"""Which functions of the package ask for a GPU or use one: an upper bound of what only a GPU runs, `python -m tests.gpu_lines`.

A function counts with all its lines if one of them names CUDA's device, NCCL or Triton, or asks whether a tensor is on a GPU,
although most of these lines run on CPU, too. `cpu_runtime.py` does not count: it is what runs in their place.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "plugin"
#: Files that name CUDA because they stand in for it.
IN_ITS_PLACE = {"plugin/megatron_backend/cpu_runtime.py"}
_DEVICE = re.compile(r"torch\.cuda\b|\.is_cuda\b|\btriton\b|\bnccl\b|[\"']cuda[\"']", re.IGNORECASE)


@dataclass(frozen=True)
class GpuFunction:
    """A function that names the device; its lines without blank ones and comments."""

    file: str
    name: str
    lines: int


def code_lines(text: str) -> int:
    """Lines of a file that are neither blank nor comments."""
    stripped = (line.strip() for line in text.splitlines())
    return sum(bool(line) and not line.startswith("#") for line in stripped)


def functions_of(file: Path) -> Iterator[GpuFunction]:
    """The outermost functions of a file that name the device."""
    name = file.relative_to(ROOT).as_posix()
    text = file.read_text()
    lines = text.splitlines()
    for node in _outermost(ast.parse(text)):
        assert node.end_lineno is not None
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        body = "\n".join(lines[first - 1 : node.end_lineno])
        docstring = ast.get_docstring(node, clean=False)
        if _DEVICE.search(body.replace(docstring, "") if docstring else body):
            yield GpuFunction(name, node.name, code_lines(body))


def _outermost(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from _outermost(child)


def found() -> tuple[list[GpuFunction], int]:
    """Every such function, and all lines of the package."""
    files = sorted(PACKAGE.rglob("*.py"))
    functions = [
        function
        for file in files
        if file.relative_to(ROOT).as_posix() not in IN_ITS_PLACE
        for function in functions_of(file)
    ]
    return functions, sum(code_lines(file.read_text()) for file in files)


def main() -> None:
    functions, total = found()
    for function in functions:
        print(f"{function.lines:4} {function.file} {function.name}")
    lines = sum(function.lines for function in functions)
    print(f"{lines} of {total} lines: {lines / total:.2%}")


if __name__ == "__main__":
    main()
