"""Every policy loss and correction with its formula, flags and reference, from its docstring.

The losses are those of `plugin.loss.POLICY_LOSSES`, the corrections the `*_function` exports of
`plugin.ppo_utils`: one that is added there is also here, in `compare`, its sweeps and the docs. The
layout of a docstring: a sentence; the formula; `Flags: ...` ending with a full stop, after which
notes may follow; `Reference: ...`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from plugin import ppo_utils
from plugin.loss import POLICY_LOSSES

Kind = Literal["policy loss", "correction"]


@dataclass(frozen=True)
class CatalogEntry:
    """One loss or correction; `selected_by` is the flag that turns it on."""

    name: str
    kind: Kind
    selected_by: str
    summary: str
    formula: str
    flags: str
    notes: str
    reference: str

    @property
    def short_name(self) -> str:
        """`vanilla_tis_function` as `vanilla_tis`."""
        return self.name.removesuffix("_function")


def catalog() -> list[CatalogEntry]:
    """All policy losses, then all corrections."""
    entries = [
        entry_of(function, name, "policy loss", f"--policy-loss {name}")
        for name, function in POLICY_LOSSES.items()
    ]
    for name, function in correction_functions().items():
        flags = f"--use-tis --custom-tis-function-path plugin.ppo_utils.{name}"
        entries.append(entry_of(function, name, "correction", flags))
    return entries


def correction_functions() -> dict[str, Callable[..., Any]]:
    """The hooks that `plugin.ppo_utils` exports, by name, the default one first."""
    names = [name for name in ppo_utils.__all__ if name.endswith("_function")]
    names.sort(key=lambda name: (name != "vanilla_tis_function", name))
    return {name: getattr(ppo_utils, name) for name in names}


def entry_of(function: Callable[..., Any], name: str, kind: Kind, selected_by: str) -> CatalogEntry:
    """The entry that the docstring of `function` describes; a ValueError if a part is missing."""
    text = inspect.getdoc(function) or ""
    match = re.fullmatch(
        r"(?P<summary>.+?)\n\n(?P<formula>.+?)\nFlags: (?P<flags>.+?)\.(?:\s(?P<notes>.+?))?"
        r"\nReference: (?P<reference>.+)",
        text,
        flags=re.DOTALL,
    )
    if match is None:
        raise ValueError(
            f"the docstring of {name} has no sentence, formula, 'Flags:' and 'Reference:' in this "
            "order"
        )
    parts = {key: " ".join((value or "").split()) for key, value in match.groupdict().items()}
    return CatalogEntry(name, kind, selected_by, **parts)
