"""What a multi-turn task is: conversations that an environment continues and scores.

A task of several turns is named with `--task-path` like any other, called as `factory(config,
tokenizer)`, and returns an object with the members of `MultiTurnTask`. Its environments run in
processes of their own, one for each engine; driver and engines only ask it for the first messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

#: A chat message as chat templates know it: `role`, `content`, and whatever else the template
#: reads.
Message = Mapping[str, Any]

#: Why a conversation is over: the environment said so, a reply was cut at --max-response-length,
#: --max-turns replies were given, or the next reply would not fit into --max-context-length.
Ending = Literal["done", "reply_cut", "max_turns", "max_context"]

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
    """The text after the thinking; empty if the thinking never ended."""
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


@dataclass(frozen=True)
class Reply:
    """What the policy said in one turn.

    text: all of it, thinking included, without the token that ended the turn
    """

    text: str

    @property
    def answer(self) -> str:
        """The text after the thinking."""
        return answer_of(self.text)

    @property
    def tool_calls(self) -> list[ToolCall | MalformedToolCall]:
        """The `<tool_call>` blocks of the answer, in order."""
        return parse_tool_calls(self.text)


@dataclass(frozen=True)
class Step:
    """How the environment answers a reply.

    messages: what follows the reply: tool output, or a user's message
    done: the conversation is over; `messages` are then ignored
    history: context compaction: replaces all messages so far, the reply included; `messages` follow
        it
    """

    messages: Sequence[Message] = ()
    done: bool = False
    history: Sequence[Message] | None = None


class Environment(Protocol):
    """The other side of one conversation. Calls are sequential, each from its own thread.

    An exception, or a call that takes longer than --environment-timeout, fails this trajectory
    only. If there is a method `close()`, it is called once at the end, whatever happened.
    """

    def step(self, reply: Reply, history: Sequence[Message]) -> Step:
        """The answer to `reply`, which is the last message of `history`."""
        ...

    def reward(self, ending: Ending) -> float:
        """The reward of the whole conversation; called once, at its end."""
        ...


@runtime_checkable
class MultiTurnTask(Protocol):
    """Conversations by number.

    stop_token_ids: what ends a reply, usually the template's end-of-turn token
    tools: JSON schemas of the tools, for the chat template; may be empty
    """

    stop_token_ids: tuple[int, ...]
    tools: Sequence[Mapping[str, Any]]

    def messages(self, index: int) -> Sequence[Message]:
        """The first messages of conversation `index`, from 0 on without end; always the same."""
        ...

    def environment(self, index: int, seed: int) -> Environment:
        """A fresh environment; what is random in it follows from `seed`."""
        ...
