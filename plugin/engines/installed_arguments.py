"""The arguments that an installed inference engine takes, read from its source: no slow import."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

#: Of each engine, the file and the dataclass whose fields are its arguments.
_SOURCES = {
    "vllm": ("engine/arg_utils.py", "EngineArgs"),
    "sglang": ("srt/server_args.py", "ServerArgs"),
}


def installed_arguments(package: str) -> set[str] | None:
    """Names of the arguments of `package` on this machine; None where they cannot be read."""
    file, name = _SOURCES[package]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    try:
        module = ast.parse((Path(spec.origin).parent / file).read_text())
    except (OSError, SyntaxError):
        return None
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _fields(node) or None
    return None


def _fields(node: ast.ClassDef) -> set[str]:
    return {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and "ClassVar" not in ast.unparse(item.annotation)
    }
