"""Rollouts of several turns: the policy and an environment speak in turn until one of them ends it.

All conversations that are still open get their next reply in one call of the engine, then all
environments take their step side by side.
"""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from plugin.config import JobConfig
from plugin.errors import BatchError
from plugin.rollout.conversation.chat_rendering import ChatRenderer, kept_thinking
from plugin.rollout.conversation.conversation import Conversation
from plugin.rollout.conversation.deadline_calls import CallFailure, run_calls
from plugin.rollout.conversation.environment_protocol import (
    Ending,
    Environment,
    MultiTurnTask,
    Reply,
    Step,
)
from plugin.rollout.conversation.trajectory import Trajectory, failed
from plugin.rollout.engines.protocol import (
    Answer,
    GenerationFailure,
    GenerationRequest,
    RolloutEngine,
    SamplingParameters,
    check_generations,
)
from plugin.rollout.tasks.protocol import Prompt, as_reward

T = TypeVar("T")


def run_multi_turn(
    engine: RolloutEngine,
    requests: Sequence[GenerationRequest],
    parameters: SamplingParameters,
    *,
    task: MultiTurnTask,
    tokenizer: Any,
    config: JobConfig,
) -> list[list[Trajectory]]:
    """For each request, one trajectory per seed; what goes wrong in one leaves the others alone.

    The request's `prompt_index` says which conversation is played. A trajectory follows from the
    weights, that number and its seed, so a request can be played again, also by another engine.
    """
    groups = [
        [_Episode(request.prompt_index, seed) for seed in request.seeds] for request in requests
    ]
    episodes = [episode for group in groups for episode in group]
    player = _Player(engine, parameters, task, renderer_of(task, tokenizer, config), config)
    try:
        player.begin(episodes)
        while waiting := [e for e in episodes if e.result is None and e.ending is None]:
            player.turn(waiting)
        player.score([episode for episode in episodes if episode.result is None])
    finally:
        player.close(episodes)
    return [[e.result for e in group if e.result is not None] for group in groups]


def renderer_of(task: MultiTurnTask, tokenizer: Any, config: JobConfig) -> ChatRenderer:
    """How the task's conversations are rendered under these flags."""
    return ChatRenderer(
        tokenizer,
        tools=task.tools,
        keep=kept_thinking(config),
        arguments=config.template_arguments(),
    )


def turn_seed(seed: int, turn: int) -> int:
    """The seed of one reply, in [0, 2^62): the same in every process and order of the batch."""
    digest = hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


class OpeningPrompts:
    """A multi-turn task as the driver sees it: prompts; rewards come with the trajectories."""

    def __init__(self, task: MultiTurnTask, tokenizer: Any, config: JobConfig) -> None:
        self._task = task
        self._renderer = renderer_of(task, tokenizer, config)
        self.stop_token_ids = task.stop_token_ids

    def prompt(self, index: int) -> Prompt:
        """The context of the first reply of conversation `index`."""
        text = self._renderer.render(self._task.messages(index))
        return Prompt(tuple(self._renderer.encode(text)))

    def reward(self, prompt: Prompt, response: Sequence[int]) -> float:
        """Refuse: only the environment has seen the whole conversation."""
        raise BatchError("a response of a multi-turn task has no reward of its own")


@dataclass
class _Episode:
    """One trajectory while it is played.

    environment, conversation: set when the episode begins
    ending: why the policy has had its last turn; result: the trajectory, once there is one
    """

    index: int
    seed: int
    environment: Environment = field(init=False)
    conversation: Conversation = field(init=False)
    ending: Ending | None = None
    result: Trajectory | None = None


class _Player:
    """What is done to many episodes at once; `run_multi_turn` gives the order."""

    def __init__(
        self,
        engine: RolloutEngine,
        parameters: SamplingParameters,
        task: MultiTurnTask,
        renderer: ChatRenderer,
        config: JobConfig,
    ) -> None:
        self._engine, self._parameters, self._config = engine, parameters, config
        self._task, self._renderer = task, renderer

    def begin(self, episodes: Sequence[_Episode]) -> None:
        """Start the environments and render the first messages."""
        calls = [partial(self._task.environment, e.index, e.seed) for e in episodes]
        for episode, environment in self._called(episodes, calls, "starting the environment"):
            episode.environment = environment
            self._guarded(episode, partial(self._open_conversation, episode))

    def turn(self, episodes: Sequence[_Episode]) -> None:
        """One reply in every episode, and the environments' answers."""
        replies: list[tuple[_Episode, Reply]] = []
        for episode, answer in zip(episodes, self._answers(episodes), strict=True):
            if isinstance(answer, GenerationFailure):
                episode.result = failed(answer.reason)
            elif answer.tokens.numel() == 0:
                episode.result = failed("empty response")
            else:
                reply = self._guarded(episode, partial(episode.conversation.add_reply, answer))
                if reply is not None and answer.finish_reason == "length":
                    episode.ending = "reply_cut"
                elif reply is not None:
                    replies.append((episode, reply))
        self._step(replies)

    def score(self, episodes: Sequence[_Episode]) -> None:
        """Ask the environments for the rewards."""
        calls = [partial(e.environment.reward, e.ending or "done") for e in episodes]
        for episode, reward in self._called(episodes, calls, "the environment's reward"):
            value = as_reward(reward) if isinstance(reward, (int, float)) else None
            if value is not None:
                talk = episode.conversation
                episode.result = Trajectory(
                    talk.samples(), value, turns=talk.turns, truncated=talk.truncated
                )
            else:
                episode.result = failed(
                    f"the environment's reward is {reprlib.repr(reward)}; it must be a finite "
                    "number"
                )

    def close(self, episodes: Sequence[_Episode]) -> None:
        """Call `close` of every environment that has one; its failure changes no result."""
        environments: list[Any] = [getattr(episode, "environment", None) for episode in episodes]
        self._run([e.close for e in environments if hasattr(e, "close")])

    def _open_conversation(self, episode: _Episode) -> None:
        messages = self._task.messages(episode.index)
        talk = Conversation(messages, self._renderer, self._task.stop_token_ids)
        episode.conversation = talk
        if not self._fits(talk):
            episode.result = failed(
                f"the first context has {len(talk.context)} tokens, which leaves no room for a "
                f"reply within --max-context-length {self._config.max_context_length}"
            )

    def _answers(self, episodes: Sequence[_Episode]) -> list[Answer]:
        """One answer per episode; those with the same context are one request."""
        by_context: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for number, episode in enumerate(episodes):
            by_context.setdefault((episode.index, episode.conversation.context), []).append(number)
        seeds = [turn_seed(e.seed, e.conversation.turns) for e in episodes]
        requests = [
            GenerationRequest(context, tuple(seeds[n] for n in numbers), index)
            for (index, context), numbers in by_context.items()
        ]
        generated = self._engine.generate(requests, self._parameters)
        check_generations(requests, generated, self._parameters)
        answers: dict[int, Answer] = {}
        for numbers, group in zip(by_context.values(), generated, strict=True):
            answers.update(zip(numbers, group, strict=True))
        return [answers[number] for number in range(len(episodes))]

    def _step(self, replies: Sequence[tuple[_Episode, Reply]]) -> None:
        """Give the replies to the environments; then comes the next turn, or the end."""
        calls = [
            partial(episode.environment.step, reply, tuple(episode.conversation.messages))
            for episode, reply in replies
        ]
        episodes = [episode for episode, _ in replies]
        for episode, step in self._called(episodes, calls, "the environment's step"):
            if not isinstance(step, Step):
                episode.result = failed(
                    f"the environment's step is a {type(step).__name__}; it must be a Step"
                )
            elif step.done:
                episode.ending = "done"
            elif episode.conversation.turns >= self._config.max_turns:
                episode.ending = "max_turns"
            else:
                self._guarded(episode, partial(episode.conversation.follow, step))
                if episode.result is None and not self._fits(episode.conversation):
                    episode.ending = "max_context"

    def _fits(self, talk: Conversation) -> bool:
        longest = self._config.max_context_length
        return longest is None or (
            len(talk.context) + self._parameters.max_response_length <= longest
        )

    def _guarded(self, episode: _Episode, action: Callable[[], T]) -> T | None:
        """`action`'s result; its exception (from template or tokenizer) fails the episode."""
        try:
            return action()
        except Exception as error:
            episode.result = failed(f"{type(error).__name__}: {error}")
            return None

    def _called(
        self, episodes: Sequence[_Episode], calls: Sequence[Callable[[], T]], what: str
    ) -> list[tuple[_Episode, T]]:
        """The episodes whose call gave a result, with it; the others fail."""
        results: list[tuple[_Episode, T]] = []
        for episode, result in zip(episodes, self._run(calls), strict=True):
            if isinstance(result, CallFailure):
                episode.result = failed(f"{what}: {result.reason}")
            else:
                results.append((episode, result))
        return results

    def _run(self, calls: Sequence[Callable[[], T]]) -> list[T | CallFailure]:
        seconds, threads = self._config.environment_timeout, self._config.environment_threads
        return run_calls(calls, seconds=seconds, threads=threads)
