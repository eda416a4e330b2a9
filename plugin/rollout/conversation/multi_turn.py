"""Rollouts of several turns: the policy and an environment speak in turn until one of them ends it.

All conversations that are still open get their next reply in one call of the engine, then all environments take
their step side by side.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from plugin.rollout.tasks.protocol import Prompt

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
    """For each request, one trajectory per seed; whatever goes wrong in one leaves the others alone.

    The request's `prompt_index` says which conversation is played. A trajectory follows from the weights, that
    number and its seed, so a request can be played again, also by another engine.
    """
    games = [[_Game(request.prompt_index, seed) for seed in request.seeds] for request in requests]
    everyone = [game for group in games for game in group]
    play = _Play(engine, parameters, task, renderer_of(task, tokenizer, config), config)
    try:
        play.begin(everyone)
        while waiting := [game for game in everyone if game.is_open]:
            play.turn(waiting)
        play.score([game for game in everyone if game.result is None])
    finally:
        play.close(everyone)
    return [[game.trajectory for game in group] for group in games]


def renderer_of(task: MultiTurnTask, tokenizer: Any, config: JobConfig) -> ChatRenderer:
    """How the task's conversations are rendered under these flags."""
    return ChatRenderer(
        tokenizer,
        tools=task.tools,
        keep=kept_thinking(config),
        arguments=config.template_arguments(),
    )


def turn_seed(seed: int, turn: int) -> int:
    """The seed of one reply, in [0, 2^62): the same in every process and for every order of the batch."""
    digest = hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


class OpeningPrompts:
    """A multi-turn task as the driver sees it: numbered prompts; rewards come with the trajectories."""

    def __init__(self, task: MultiTurnTask, tokenizer: Any, config: JobConfig) -> None:
        self._task = task
        self._renderer = renderer_of(task, tokenizer, config)
        self.stop_token_ids = task.stop_token_ids

    def prompt(self, index: int) -> Prompt:
        """The context of the first reply of conversation `index`."""
        text = self._renderer.render(self._task.messages(index))
        return Prompt(tuple(self._renderer.encode(text)))

    def reward(self, prompt: Prompt, response: Sequence[int]) -> float:
        """Refuses: only the environment has seen the whole conversation."""
        raise BatchError("a response of a multi-turn task has no reward of its own")


@dataclass
class _Game:
    """One trajectory while it is played."""

    index: int
    seed: int
    conversation: Conversation | None = None
    environment: Environment | None = None
    ending: Ending | None = None
    result: Trajectory | None = None

    @property
    def is_open(self) -> bool:
        """Whether the policy speaks next."""
        return self.result is None and self.ending is None

    @property
    def talk(self) -> Conversation:
        """The conversation of a game that has begun."""
        assert self.conversation is not None
        return self.conversation

    @property
    def trajectory(self) -> Trajectory:
        """The outcome of a game that is over."""
        assert self.result is not None
        return self.result

    def fail(self, reason: str) -> None:
        self.result = failed(reason)


class _Play:
    """What is done to many games at once; `run_multi_turn` gives the order."""

    def __init__(
        self,
        engine: RolloutEngine,
        parameters: SamplingParameters,
        task: MultiTurnTask,
        renderer: ChatRenderer,
        config: JobConfig,
    ) -> None:
        self._engine = engine
        self._parameters = parameters
        self._task = task
        self._renderer = renderer
        self._config = config

    def begin(self, games: Sequence[_Game]) -> None:
        """Renders the first messages and starts the environments."""
        calls = [functools.partial(self._task.environment, game.index, game.seed) for game in games]
        for game, environment in self._called(games, calls, "starting the environment"):
            game.environment = environment
            self._guarded(game, functools.partial(self._open_conversation, game))

    def turn(self, games: Sequence[_Game]) -> None:
        """One reply in every game, and the environments' answers."""
        replies: list[tuple[_Game, Reply]] = []
        for game, answer in zip(games, self._answers(games), strict=True):
            if isinstance(answer, GenerationFailure):
                game.fail(answer.reason)
            elif answer.tokens.numel() == 0:
                game.fail("empty response")
            else:
                reply = self._guarded(game, functools.partial(game.talk.add_reply, answer))
                if reply is not None and answer.finish_reason == "length":
                    game.ending = "reply_cut"
                elif reply is not None:
                    replies.append((game, reply))
        self._step(replies)

    def score(self, games: Sequence[_Game]) -> None:
        """Asks the environments for the rewards."""
        calls = [
            functools.partial(_environment(game).reward, game.ending or "done") for game in games
        ]
        for game, reward in self._called(games, calls, "the environment's reward"):
            if isinstance(reward, (int, float)) and math.isfinite(reward):
                game.result = Trajectory(
                    game.talk.segments(), reward=float(reward), turns=game.talk.turns
                )
            else:
                game.fail(f"the environment's reward is {reward!r}; it must be a finite number")

    def close(self, games: Sequence[_Game]) -> None:
        """Calls `close` of every environment that has one; its failure changes no result."""
        closers = [getattr(game.environment, "close", None) for game in games]
        self._run([closer for closer in closers if closer is not None])

    def _open_conversation(self, game: _Game) -> None:
        messages = self._task.messages(game.index)
        game.conversation = Conversation(messages, self._renderer, self._task.stop_token_ids)
        if not self._fits(game):
            game.fail(
                f"the first context has {len(game.talk.context)} tokens, which leaves no room for a reply within "
                f"--max-context-length {self._config.max_context_length}"
            )

    def _answers(self, games: Sequence[_Game]) -> list[Answer]:
        """One answer per game. Games with the same context, as in a first turn, are one request."""
        by_context: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for number, game in enumerate(games):
            by_context.setdefault((game.index, game.talk.context), []).append(number)
        requests = [
            GenerationRequest(
                context,
                tuple(turn_seed(games[n].seed, games[n].talk.turns) for n in numbers),
                index,
            )
            for (index, context), numbers in by_context.items()
        ]
        generated = self._engine.generate(requests, self._parameters)
        check_generations(requests, generated, self._parameters)
        answers: dict[int, Answer] = {}
        for numbers, group in zip(by_context.values(), generated, strict=True):
            answers.update(zip(numbers, group, strict=True))
        return [answers[number] for number in range(len(games))]

    def _step(self, replies: Sequence[tuple[_Game, Reply]]) -> None:
        """Hands the replies to the environments and brings the games to their next turn, or to their end."""
        games = [game for game, _ in replies]
        calls = [
            functools.partial(_environment(game).step, reply, tuple(game.talk.messages))
            for game, reply in replies
        ]
        for game, step in self._called(games, calls, "the environment's step"):
            if not isinstance(step, Step):
                game.fail(f"the environment's step is a {type(step).__name__}; it must be a Step")
            elif step.done:
                game.ending = "done"
            elif game.talk.turns >= self._config.max_turns:
                game.ending = "max_turns"
            else:
                self._guarded(game, functools.partial(self._go_on, game, step))

    def _go_on(self, game: _Game, step: Step) -> None:
        game.talk.follow(step)
        if not self._fits(game):
            game.ending = "max_context"

    def _fits(self, game: _Game) -> bool:
        longest = self._config.max_context_length
        needed = len(game.talk.context) + self._parameters.max_response_length
        return longest is None or needed <= longest

    def _guarded(self, game: _Game, action: Callable[[], T]) -> T | None:
        """`action`'s result; its exception (a template or tokenizer that refuses) fails the game."""
        try:
            return action()
        except Exception as error:
            game.fail(f"{type(error).__name__}: {error}")
            return None

    def _called(
        self, games: Sequence[_Game], calls: Sequence[Callable[[], T]], what: str
    ) -> list[tuple[_Game, T]]:
        """The games whose call gave a result, with it; the others fail."""
        results: list[tuple[_Game, T]] = []
        for game, result in zip(games, self._run(calls), strict=True):
            if isinstance(result, CallFailure):
                game.fail(f"{what}: {result.reason}")
            else:
                results.append((game, result))
        return results

    def _run(self, calls: Sequence[Callable[[], T]]) -> list[T | CallFailure]:
        config = self._config
        return run_calls(
            calls, seconds=config.environment_timeout, threads=config.environment_threads
        )


def _environment(game: _Game) -> Environment:
    assert game.environment is not None
    return game.environment
