"""Load the user's own losses, corrections, engines, ... by import path.

Three spellings: `package.module.function`, `package.module:function` and
`path/to/file.py:function`. Loading runs the code of that module.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from plugin.errors import HookLoadError, MegatronTisError
from plugin.json_lines import read_settings


def is_import_path(text: str) -> bool:
    """Whether `text` names a function by path rather than a built-in by name."""
    return "." in text or ":" in text


def function_name(path: str) -> str:
    """The name of the function at the end of an import path, in either spelling."""
    return path.replace(":", ".").rpartition(".")[2]


@lru_cache(maxsize=256)
def load_function(path: str) -> Callable[..., Any]:
    """The function at `path`; a module is imported once per process."""
    module_name, name = _split(path)
    module = (
        _import_file(path, module_name)
        if module_name.endswith(".py")
        else _import(path, module_name)
    )
    function = getattr(module, name, None)
    if function is None:
        public = sorted(
            other for other, value in vars(module).items() if callable(value) and other[0] != "_"
        )
        raise HookLoadError(
            f"{path!r}: {module_name} has no {name!r}; it has "
            f"{', '.join(public[:20]) or 'no functions'}"
        )
    if not callable(function):
        raise HookLoadError(f"{path!r} is a {type(function).__name__}; a function is needed")
    return function


def load_called_with(option: str, path: str, *arguments: str) -> Callable[..., Any]:
    """Load the function at `path` and check that it can be called as `fn(*arguments)`.

    option: the flag that names it, for the error
    """
    function = load_function(path)
    # Some compiled code has no signature to check.
    with contextlib.suppress(ValueError):
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            raise HookLoadError(
                f"{option} {path} cannot be called as fn({', '.join(arguments)}): {error}; change "
                "its arguments"
            ) from error
    return function


def try_on_example(what: str, function: Callable[..., Any], *values: Any, **named: Any) -> Any:
    """Call the user's `function` before the job starts; what it raises becomes a `HookLoadError`.

    what: the flag or the hook that names it, and the example, for the error
    """
    try:
        return function(*values, **named)
    except MegatronTisError:
        raise
    except Exception as error:
        shown = "".join(traceback.format_tb(error.__traceback__)[1:][-3:])
        raise HookLoadError(
            f"{what}: {type(error).__name__}: {error}; correct it\n{shown}"
        ) from error


def _split(path: str) -> tuple[str, str]:
    if path.endswith(".py"):
        raise HookLoadError(
            f"{path!r} is a file, and :function is missing; write {path}:{_functions_in(path)}"
        )
    module_name, separator, name = path.rpartition(":")
    if not separator:
        module_name, _, name = path.rpartition(".")
    is_file = separator and module_name.endswith(".py")
    if not module_name or not name.isidentifier() or ("/" in module_name and not is_file):
        raise HookLoadError(
            f"{path!r} is not the path of a function; write package.module.function, "
            "package.module:function or path/to/file.py:function"
        )
    return module_name, name


def _functions_in(file: str) -> str:
    """The public functions and classes in a file, which is read and not run."""
    try:
        body = ast.parse(read_settings(Path(file).expanduser())).body
    except (OSError, ValueError, SyntaxError, RecursionError):
        body = []
    named = [n.name for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    return " or :".join(name for name in named if name[0] != "_") or "NAME"


def _import(path: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        own = error.name is not None and (module_name + ".").startswith(error.name + ".")
        if own:
            raise HookLoadError(
                f"{path!r}: no module named {error.name!r}; is its folder on PYTHONPATH, in the "
                "driver's environment and on every node?"
            ) from error
        raise _import_failed(path) from error
    except Exception as error:
        raise _import_failed(path) from error


def _import_file(path: str, file_name: str) -> ModuleType:
    file = Path(file_name).expanduser().resolve()
    if not file.is_file():
        raise HookLoadError(
            f"{path!r}: there is no file {str(file)!r}; give a path that every node can read"
        )
    # A name of its own per file: two files called hook.py must not replace each other.
    name = f"megatron_tis_hook_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _import_failed(path) from error
    return module


def _import_failed(path: str) -> HookLoadError:
    return HookLoadError(f"importing {path!r} failed:\n{traceback.format_exc()}")
