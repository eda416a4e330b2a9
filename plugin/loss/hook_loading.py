"""Load correction hooks by import path and check that they can be called as we call them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from plugin.config.import_paths import load_function
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
EXTRA_ARGUMENTS = ("cur_log_probs", "advantages", "batch_statistics")


@lru_cache(maxsize=256)
def load_hook(path: str) -> Callable[..., Any]:
    """Load the hook at `path` as a function of keywords that passes on what the hook accepts."""
    function = load_function(path)
    accepted, takes_any = _keyword_arguments(path, function)
    missing = [name for name in REQUIRED_ARGUMENTS if name not in accepted and not takes_any]
    if missing:
        raise HookLoadError(
            f"hook {path!r} does not accept {', '.join(missing)}; name these arguments or add "
            "**kwargs"
        )
    extras = [name for name in EXTRA_ARGUMENTS if takes_any or name in accepted]
    # slime passes `args` by name; a hook whose namespace comes first under another name gets it by
    # position.
    by_keyword = "args" in accepted

    def call(args: Any, **values: Any) -> Any:
        passed = {name: values[name] for name in REQUIRED_ARGUMENTS}
        passed |= {name: values[name] for name in extras if name in values}
        return function(args=args, **passed) if by_keyword else function(args, **passed)

    return call


def _keyword_arguments(path: str, function: Callable[..., Any]) -> tuple[set[str], bool]:
    """Return the keywords a hook accepts and whether it takes any; refuse unknown required ones."""
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
            f"hook {path!r} requires {', '.join(unknown)}, which no caller passes; give it a "
            "default"
        )
    accepted = {p.name for p in parameters if p.kind not in (*optional_kinds, p.POSITIONAL_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if first in (*REQUIRED_ARGUMENTS, *EXTRA_ARGUMENTS, "args") and "args" not in accepted:
        if not takes_any:
            raise HookLoadError(
                f"hook {path!r} does not accept args; give it a first argument for the flags, or "
                "**kwargs"
            )
        accepted |= {"args"}
    return accepted, takes_any
