"""Loads functions named by path, once, and checks that a correction hook can be called as we call it.

Three spellings: `package.module.function`, `package.module:function` and `path/to/file.py:function`.
Loading runs the code of that module.
"""

from __future__ import annotations

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

from plugin.errors import HookLoadError

#: What slime passes to a hook; every hook has to accept these.
REQUIRED_ARGUMENTS = (
    "pg_loss",
    "train_log_probs",
    "rollout_log_probs",
    "loss_masks",
    "total_lengths",
    "response_lengths",
)
#: What we pass on top, to the hooks that accept it.
EXTRA_ARGUMENTS = ("cur_log_probs", "advantages")


@lru_cache(maxsize=256)
def load_function(path: str) -> Callable[..., Any]:
    """The function at `path`; a module is imported once per process."""
    module_name, function_name = _split(path)
    module = (
        _import_file(path, module_name)
        if module_name.endswith(".py")
        else _import(path, module_name)
    )
    function = getattr(module, function_name, None)
    if function is None:
        public = sorted(
            name for name, value in vars(module).items() if callable(value) and name[0] != "_"
        )
        raise HookLoadError(
            f"{path!r}: {module_name} has no {function_name!r}; it has {', '.join(public[:20]) or 'no functions'}"
        )
    if not callable(function):
        raise HookLoadError(f"{path!r} is a {type(function).__name__}; a function is needed")
    return function


@lru_cache(maxsize=256)
def load_hook(path: str) -> Callable[..., Any]:
    """The correction hook at `path`, as a function of keyword arguments that passes on what it accepts."""
    function = load_function(path)
    accepted, takes_any = _keyword_arguments(path, function)
    missing = [name for name in REQUIRED_ARGUMENTS if name not in accepted and not takes_any]
    if missing:
        raise HookLoadError(
            f"hook {path!r} does not accept {', '.join(missing)}; name these arguments or add **kwargs"
        )
    extras = [name for name in EXTRA_ARGUMENTS if takes_any or name in accepted]
    # slime passes `args` by name; a hook whose namespace comes first under another name gets it by position.
    by_keyword = "args" in accepted

    def call(args: Any, **values: Any) -> Any:
        passed = {name: values[name] for name in (*REQUIRED_ARGUMENTS, *extras)}
        return function(args=args, **passed) if by_keyword else function(args, **passed)

    return call


def _keyword_arguments(path: str, function: Callable[..., Any]) -> tuple[set[str], bool]:
    """Names the function accepts as keywords and whether it takes any; unknown required ones are an error."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return {"args"}, True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    # The namespace comes first, under whatever name; everything else is matched by name.
    first = positional[0].name if positional else "args"
    known = {first, "args", *REQUIRED_ARGUMENTS, *EXTRA_ARGUMENTS}
    optional_kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    unknown = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in optional_kinds and p.name not in known
    ]
    if unknown:
        raise HookLoadError(
            f"hook {path!r} requires {', '.join(unknown)}, which no caller passes; give it a default"
        )
    accepted = {p.name for p in parameters if p.kind not in (*optional_kinds, p.POSITIONAL_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if first in (*REQUIRED_ARGUMENTS, *EXTRA_ARGUMENTS, "args") and "args" not in accepted:
        if not takes_any:
            raise HookLoadError(
                f"hook {path!r} does not accept args; give it a first argument for the flags, or **kwargs"
            )
        accepted |= {"args"}
    return accepted, takes_any


def _split(path: str) -> tuple[str, str]:
    module_name, separator, function_name = path.rpartition(":")
    if not separator:
        module_name, _, function_name = path.rpartition(".")
    is_file = separator and module_name.endswith(".py")
    if not module_name or not function_name.isidentifier() or ("/" in module_name and not is_file):
        raise HookLoadError(
            f"{path!r} names no function; write package.module.function, package.module:function or "
            "path/to/file.py:function"
        )
    return module_name, function_name


def _import(path: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        own = error.name is not None and (module_name + ".").startswith(error.name + ".")
        if own:
            raise HookLoadError(
                f"{path!r}: no module named {error.name!r}; is its folder on PYTHONPATH, in the driver's "
                "environment and on every node?"
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
