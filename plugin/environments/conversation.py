"""One conversation as training samples: exactly the tokens that the policy read and sampled.

A sample goes on while the next turn's rendering extends what has been streamed, and ends where it
does not. Text decides whether it does, because a tokenizer need not give back the tokens that were
sampled; sampled tokens are never tokenized again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from plugin.batch_types import RolloutSample
from plugin.engines.expert_routes import continued_routes
from plugin.engines.protocol import Generation
from plugin.environments.chat_rendering import ChatRenderer, is_user
from plugin.environments.environment_protocol import Message, Reply, Step
from plugin.errors import BatchError
from plugin.ragged import Ragged


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

    def add_reply(self, generation: Generation, text: str) -> None:
        """Append tokens that the policy sampled."""
        self.text += text
        self._tokens += generation.tokens.tolist()
        self._mask += [1] * generation.tokens.numel()
        if generation.log_probs is not None:
            self._log_probs.append(generation.log_probs.float())
        self._versions.append(generation.token_versions())
        if generation.sampling_mask is not None:
            self._kept.append(generation.sampling_mask)
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
        )
