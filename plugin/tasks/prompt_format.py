"""Which columns of a row mean what, and the prompt text that is made from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plugin.config import JobConfig

_MISSING = object()


def lookup(row: Mapping[str, Any], key: str) -> Any:
    """The value of a column; `a.b` is column `a.b`, or `b` inside of `a`; `KeyError` if neither."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        value = value.get(part, _MISSING) if isinstance(value, Mapping) else _MISSING
        if value is _MISSING:
            raise KeyError(key)
    return value


@dataclass(frozen=True)
class PromptFormat:
    """How rows become prompts.

    system_prompt: the first message, unless a row's messages begin with one of their own
    tools_key: the column with the tools of a row: a list of JSON schemas, or JSON text of one
    chat: the text is made by the tokenizer's chat template
    template_arguments: what the template is called with besides messages and tools
    """

    prompt_key: str = "prompt"
    label_key: str = "answer"
    system_prompt: str | None = None
    tools_key: str | None = None
    chat: bool = False
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: JobConfig) -> PromptFormat:
        """What the flags say."""
        return cls(
            config.prompt_key,
            config.label_key,
            config.system_prompt,
            config.tools_key,
            config.apply_chat_template,
            config.template_arguments(),
        )

    def problem(self, row: Mapping[str, Any]) -> str | None:
        """Why the row has no prompt; None if it has one."""
        try:
            prompt = lookup(row, self.prompt_key)
        except KeyError:
            return no_column(row, self.prompt_key, "--prompt-key")
        if not isinstance(prompt, str):
            problem = _messages_problem(prompt, self.chat)
            if problem is not None:
                return problem
        return None if self.tools_key is None else _tools_problem(row, self.tools_key)

    def text(self, row: Mapping[str, Any], tokenizer: Any) -> str:
        """The prompt text of a row without a problem; raises what the template raises."""
        prompt = lookup(row, self.prompt_key)
        if not self.chat:
            return str(prompt)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages = _without_nulls(messages)
        if self.system_prompt is not None and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        named: dict[str, Any] = {} if self.tools_key is None else {"tools": self._tools(row)}
        text: str = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=True,
            **named,
            **self.template_arguments,
        )
        return text

    def _tools(self, row: Mapping[str, Any]) -> Any:
        tools = lookup(row, self.tools_key or "")
        return (json.loads(tools) if isinstance(tools, str) else _without_nulls(tools)) or None


def no_column(row: Mapping[str, Any], key: str, option: str) -> str:
    """Error text for a row without column `key`, which `option` names."""
    there = ", ".join(list(map(str, row))[:12]) or "nothing"
    return f"no {key!r}; it has {there}; name the column with {option}"


def _messages_problem(prompt: Any, chat: bool) -> str | None:
    if not isinstance(prompt, list):
        return (
            f"the prompt is of type {type(prompt).__name__}; it must be text or a list of messages"
        )
    if not chat:
        return "the prompt is a list of messages; render it with --apply-chat-template"
    if not prompt or not all(isinstance(message, dict) for message in prompt):
        return 'the prompt must be a list of messages such as {"role": "user", "content": "..."}'
    return None


def _tools_problem(row: Mapping[str, Any], key: str) -> str | None:
    try:
        tools = lookup(row, key)
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except KeyError:
        return no_column(row, key, "--tools-key")
    except (ValueError, RecursionError) as error:
        return f"{key!r} is text that is not JSON ({error})"
    if tools is None or (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        return None
    return f"{key!r} must be a list of JSON schemas, or JSON text of one; it is {str(tools)[:100]}"


def _without_nulls(value: Any) -> Any:
    """`value` without the null keys that a table adds to a row because other rows have them."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None or k == "content"}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
