"""An environment that makes the tool calls of each reply and ends when a reply has none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plugin.environments.environment_protocol import (
    Ending,
    MalformedToolCall,
    Message,
    Reply,
    Step,
    ToolCall,
)


class ToolEnvironment:
    """Tools by name, and a function that scores the last answer.

    tools: called with the call's arguments as keywords; what they return is shown to the model as
        text, or as JSON if it is no string
    score: fn(answer, ending) -> float; the answer is the last complete reply after its thinking
    """

    def __init__(
        self,
        tools: Mapping[str, Callable[..., Any]],
        score: Callable[[str, Ending], float],
    ) -> None:
        self._tools = tools
        self._score = score
        self._answer = ""

    def step(self, reply: Reply, history: Sequence[Message]) -> Step:
        """One tool message per call; the model is told what went wrong in one and can try again."""
        self._answer = reply.answer
        messages: list[Message] = []
        for call in reply.tool_calls:
            if isinstance(call, MalformedToolCall):
                text = f"error: the tool call is malformed: {call.reason}"
                messages.append({"role": "tool", "content": text})
            else:
                messages.append({"role": "tool", "name": call.name, "content": self._output(call)})
        return Step(messages, done=not messages)

    def reward(self, ending: Ending) -> float:
        """The score of the last answer."""
        return self._score(self._answer, ending)

    def _output(self, call: ToolCall) -> str:
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name!r}; there are {', '.join(self._tools)}"
        try:
            output = tool(**call.arguments)
        except Exception as error:  # a tool's own failure is the model's to handle
            return f"error: {type(error).__name__}: {error}"
        return output if isinstance(output, str) else json.dumps(output)
