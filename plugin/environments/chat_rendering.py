"""Chat messages as the text that the model reads, through its chat template.

Templates of thinking models drop the thinking of older replies. To keep it, a reply's own text is
put where the template rendered the reply: the messages are rendered with a mark in place of the
reply's content, and the mark is then replaced. That needs no knowledge of the template and no
switch in it.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from plugin.config import ConversationFlags
from plugin.environments.environment_protocol import Message

#: Whose thinking stays: what the template keeps, all since the last user message, or all.
KeptThinking = Literal["template", "between_tool_calls", "all"]

#: Makes a mark that no message holds; it is gone before anybody sees the text.
_SALT = uuid.uuid4().hex


def kept_thinking(config: ConversationFlags) -> KeptThinking:
    """What the flags say; keeping all thinking includes keeping it between tool calls."""
    if config.preserve_all_thinking:
        return "all"
    return "between_tool_calls" if config.preserve_thinking_between_tool_calls else "template"


class ChatRenderer:
    """Renders, encodes and decodes.

    tokenizer: with `encode`, `decode` and `apply_chat_template` as Hugging Face tokenizers have
        them
    keep: whose thinking stays
    arguments: what the template is called with besides messages and tools
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        keep: KeptThinking = "template",
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = list(tools) or None
        self._arguments = dict(arguments or {})
        self.keep = keep

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text, which already holds every special token it needs."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens as they are: special tokens shown, spaces untouched."""
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def render(self, messages: Sequence[Message]) -> str:
        """`messages` and the prompt for the next reply, with the kept thinking."""
        kept = self._kept(messages)
        text = self._template(_marked(messages, kept))
        if any(text.count(_mark(number)) != 1 for number in kept):
            return self._template(messages)
        for number in reversed(kept):
            before, _, after = text.partition(_mark(number))
            text = self._opening(_marked(messages[:number], kept), before)
            thinking, content = (
                messages[number].get("reasoning_content"),
                messages[number]["content"],
            )
            text += f"<think>\n{thinking}\n</think>\n\n" if thinking else ""
            text += str(content) + after
        return text

    def text_after(self, messages: Sequence[Message], number: int) -> str | None:
        """What the template puts after the content of message `number`; None if unknown."""
        parts = self._template(_marked(messages, [number])).split(_mark(number))
        return parts[1] if len(parts) == 2 else None

    def _kept(self, messages: Sequence[Message]) -> list[int]:
        """Numbers of the replies whose own text replaces the template's rendering."""
        if self.keep == "template":
            return []
        first = 0
        if self.keep == "between_tool_calls":
            users = [number for number, message in enumerate(messages) if is_user(message)]
            first = users[-1] if users else 0
        return [
            number
            for number in range(first, len(messages))
            if messages[number]["role"] == "assistant"
            and isinstance(messages[number].get("content"), str)
        ]

    def _opening(self, earlier: Sequence[Message], before: str) -> str:
        """The text up to a reply's own, as it was when the reply was sampled.

        earlier: the messages before the reply
        before: the template's text up to the reply's content. It may lack what the prompt for a
            reply has (an opening `<think>`) or have more (an empty thinking block), so that prompt
            replaces it.
        """
        if earlier and before.startswith(self._template(earlier, add_generation_prompt=False)):
            return self._template(earlier)
        return before

    def _template(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        text: str = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=self._tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self._arguments,
        )
        return text


def is_user(message: Message) -> bool:
    """Whether a user wrote it; some templates carry tool output in messages of the role `user`."""
    if message["role"] != "user":
        return False
    content = message.get("content")
    if not isinstance(content, str):
        return True
    return not (content.startswith("<tool_response>") and content.endswith("</tool_response>"))


def _mark(number: int) -> str:
    # Letters and digits alone: a template may split a content at anything else.
    return f"reply{number}of{_SALT}"


def _marked(messages: Sequence[Message], numbers: Collection[int]) -> list[Message]:
    """`messages` with a mark as the content of those in `numbers`, and no thinking of theirs."""
    marked: list[Message] = list(messages)
    for number in numbers:
        if number < len(marked):
            rest = {k: v for k, v in marked[number].items() if k != "reasoning_content"}
            marked[number] = {**rest, "content": _mark(number)}
    return marked
