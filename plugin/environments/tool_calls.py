"""Tool calls in a reply's text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_END_OF_THINKING = "</think>"
_START_OF_THINKING = "<think>"


@dataclass(frozen=True)
class ToolCall:
    """A call that can be made."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class MalformedToolCall:
    """A call that cannot be made, and why: something to tell the model."""

    text: str
    reason: str


def answer_of(text: str) -> str:
    """What follows the thinking; nothing if the thinking never ended."""
    _, ended, answer = text.rpartition(_END_OF_THINKING)
    if not ended and _START_OF_THINKING in text:
        return text.partition(_START_OF_THINKING)[0]
    return answer


def parse_tool_calls(text: str) -> list[ToolCall | MalformedToolCall]:
    """The calls in `text`, in order, without those that the thinking only considers."""
    calls: list[ToolCall | MalformedToolCall] = []
    for block in answer_of(text).split(_OPEN)[1:]:
        body, closed, _ = block.partition(_CLOSE)
        missing = MalformedToolCall(body.strip(), f"{_CLOSE} is missing")
        calls.append(_parsed(body.strip()) if closed else missing)
    return calls


def _parsed(body: str) -> ToolCall | MalformedToolCall:
    try:
        call = json.loads(body)
    # Nesting without end is a RecursionError, a number with too many digits a ValueError.
    except (ValueError, RecursionError) as error:
        return MalformedToolCall(body, f"not JSON: {error}")
    if not isinstance(call, dict):
        return MalformedToolCall(body, "not a JSON object")
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str):
        return MalformedToolCall(body, '"name" is not a string')
    if not isinstance(arguments, dict):
        return MalformedToolCall(body, '"arguments" is not an object')
    return ToolCall(name, arguments)
