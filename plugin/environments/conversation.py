"""One conversation as training samples: exactly the tokens that the policy read and sampled.

A sample goes on while the next turn's rendering extends what has been streamed, and ends where it
does not. Text decides whether it does, because a tokenizer need not give back the tokens that were
sampled; sampled tokens are never tokenized again.

Messages are rendered by the model's chat template. Templates of thinking models drop the thinking
of older replies. To keep it, the messages are rendered with a mark in place of a reply's content,
and the mark is then replaced by the reply's own text; that needs no knowledge of the template and
no switch in it.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from plugin.batch_types import RolloutSample, SamplerHead
from plugin.config import ConversationFlags
from plugin.engines.expert_routes import continued_routes
from plugin.engines.protocol import Generation
from plugin.environments.environment_protocol import Message, Reply, Step
from plugin.errors import BatchError
from plugin.ragged import Ragged

#: Whose thinking stays: what the template keeps, all since the last user message, or all.
KeptThinking = Literal["template", "between_tool_calls", "all"]
#: Makes a mark that no message holds; it is gone before anybody sees the text.
_SALT = uuid.uuid4().hex


class Conversation:
    """Messages, and the training samples that they make.

    `context` goes to the engine, `add_reply` takes its answer, `follow` takes the environment's.

    truncated: whether the last reply was cut at --max-response-length
    """

    def __init__(
        self, messages: Sequence[Message], renderer: ChatRenderer, stop_token_ids: Sequence[int]
    ) -> None:
        self.messages: list[Message] = _checked(messages)
        self.turns = 0
        self.truncated = False
        self._renderer = renderer
        self._stop_token_ids = frozenset(stop_token_ids)
        self._end_of_turn = ""
        self._closed: list[RolloutSample] = []
        self._open = _OpenSample(renderer, renderer.render(self.messages))

    @property
    def context(self) -> tuple[int, ...]:
        """What the policy reads before its next reply."""
        return self._open.context

    def samples(self) -> tuple[RolloutSample, ...]:
        """The training samples so far; what follows the last reply is in none of them."""
        return (*self._closed, *([self._open.sample()] if self._open.generations else []))

    def add_reply(self, generation: Generation) -> Reply:
        """Append the policy's reply to `context`."""
        tokens = generation.tokens.tolist()
        ended = bool(tokens) and tokens[-1] in self._stop_token_ids
        text = self._renderer.decode(tokens[:-1] if ended else tokens)
        self._end_of_turn = self._renderer.decode(tokens[-1:]) if ended else ""
        self._open.add_reply(generation, text + self._end_of_turn)
        self.messages.append({"role": "assistant", "content": text})
        self.turns += 1
        self.truncated = generation.finish_reason == "length"
        return Reply(text)

    def follow(self, step: Step) -> None:
        """Append the environment's step, and move `context` to the next turn."""
        if not step.messages and step.history is None:
            raise BatchError(
                "the environment neither ended the conversation nor added a message; return "
                "done=True, messages or a history"
            )
        reply = len(self.messages) - 1
        before = self.messages if step.history is None else step.history
        self.messages = _checked([*before, *step.messages])
        added = self._kept_continuation(reply) if self._keeps_stream(step) else None
        if added is None:
            rendering = self._renderer.render(self.messages)
            if not rendering.startswith(self._open.text):
                self._closed.append(self._open.sample())
                self._open = _OpenSample(self._renderer, rendering)
                return
            added = rendering[len(self._open.text) :]
        self._open.add_text(added)

    def _keeps_stream(self, step: Step) -> bool:
        """Whether the tokens so far stay as they are, whatever the template makes of them."""
        if step.history is not None or self._renderer.keep == "template":
            return False
        return self._renderer.keep == "all" or not any(map(is_user, step.messages))

    def _kept_continuation(self, reply: int) -> str | None:
        """What the template adds after message `reply`, without the policy's own end of turn."""
        added = self._renderer.text_after(self.messages, reply)
        if added is not None and self._end_of_turn:
            # A template may put white space before its end of turn; the policy's end replaces both.
            trimmed = added.lstrip()
            if trimmed.startswith(self._end_of_turn):
                return trimmed[len(self._end_of_turn) :]
        return added


def _checked(messages: Sequence[Message]) -> list[Message]:
    """`messages` if each has a role: a template would silently render one without."""
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BatchError(
                f"message {message!r} has no role; a message is a mapping with role and content"
            )
    return list(messages)


class _OpenSample:
    """A training sample while it grows.

    text: of the prompt and all that follows it; generations: the replies so far
    """

    def __init__(self, renderer: ChatRenderer, prompt: str) -> None:
        self.text = prompt
        self._renderer = renderer
        self._prompt = tuple(renderer.encode(prompt))
        self._tokens: list[int] = []
        self._mask: list[int] = []
        self._log_probs: list[Tensor] = []
        self._versions: list[Tensor] = []
        self._kept: list[Ragged] = []
        self._heads: list[SamplerHead | int] = []
        self._routes: Tensor | None = None
        self._route_weights: Tensor | None = None
        self.generations: list[Generation] = []
        self._end_of_last_reply = 0

    @property
    def context(self) -> tuple[int, ...]:
        return (*self._prompt, *self._tokens)

    def add_text(self, text: str) -> None:
        """Append tokens that the policy reads and did not sample: no loss, no log-prob."""
        tokens = self._renderer.encode(text)
        self.text += text
        self._tokens += tokens
        self._mask += [0] * len(tokens)
        self._log_probs.append(torch.zeros(len(tokens)))
        self._versions.append(torch.full((len(tokens),), -1))
        self._kept.append(Ragged(torch.zeros(0, dtype=torch.int32), [0] * len(tokens)))
        self._heads.append(len(tokens))

    def add_reply(self, generation: Generation, text: str) -> None:
        """Append tokens that the policy sampled."""
        self.text += text
        self._tokens += generation.tokens.tolist()
        self._mask += generation.token_mask().tolist()
        if generation.log_probs is not None:
            self._log_probs.append(generation.log_probs.float())
        self._versions.append(generation.token_versions())
        if generation.sampling_mask is not None:
            self._kept.append(generation.sampling_mask)
        if generation.head is not None:
            self._heads.append(generation.head)
        if generation.routed_experts is not None:
            self._routes = continued_routes(self._routes, generation.routed_experts)
        if generation.routed_weights is not None:
            self._route_weights = continued_routes(self._route_weights, generation.routed_weights)
        self.generations.append(generation)
        self._end_of_last_reply = len(self._tokens)

    def sample(self) -> RolloutSample:
        """The training sample, up to the end of the last reply."""
        last, end = self.generations[-1], self._end_of_last_reply
        masked = last.sampling_mask is not None
        return RolloutSample(
            tokens=torch.tensor([*self._prompt, *self._tokens[:end]], dtype=torch.int64),
            response_length=end,
            loss_mask=torch.tensor(self._mask[:end], dtype=torch.int64),
            weight_version=torch.cat(self._versions)[:end],
            rollout_log_probs=None if last.log_probs is None else torch.cat(self._log_probs)[:end],
            routed_experts=self._routes,
            sampling_mask=Ragged.concatenated(self._kept)[:end] if masked else None,
            routed_weights=self._route_weights,
            head=None if last.head is None else self._head(last.head.ids.shape[1]).first(end),
        )

    def _head(self, k: int) -> SamplerHead:
        """Of all tokens so far; those that the policy did not sample have none."""
        return SamplerHead.joined(
            [SamplerHead.absent(part, k) if isinstance(part, int) else part for part in self._heads]
        )


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
