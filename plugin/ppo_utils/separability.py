"""The declaration that a loss or a correction treats every token apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def token_separable(function: Function) -> Function:
    """Declare that what `function` makes of a token depends on that token's inputs alone.

    Not on other tokens, not on the length or the number of samples. The loss of such tokens can be evaluated
    inside the LM head, block by block. The declaration is checked: a function that turns out to mix tokens is
    evaluated the ordinary way.
    """
    function.token_separable = True  # type: ignore[attr-defined]
    return function


def declares_separable(function: Callable[..., Any]) -> bool:
    """Whether `function` was declared `token_separable`."""
    return bool(getattr(function, "token_separable", False))
