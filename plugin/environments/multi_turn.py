"""Multi-turn rollouts: policy and environment take turns until one of them ends the conversation.

Conversations do not wait for each other: each asks for its next reply when its environment has
answered, and replies join the engine's batch as they are asked for.
"""

from __future__ import annotations

import hashlib
import itertools
import reprlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from plugin.config import JobConfig
from plugin.engines.protocol import (
    Answer,
    GenerationFailure,
    GenerationRequest,
    SamplingParameters,
)
from plugin.engines.response_stream import ResponseStream
from plugin.environments.conversation import ChatRenderer, Conversation, kept_thinking
from plugin.environments.deadline_calls import CallFailure
from plugin.environments.environment_calls import EnvironmentCalls, LocalEnvironments, Method
from plugin.environments.environment_protocol import Ending, MultiTurnTask, Step
from plugin.environments.group_server import PlayedGroup, Player, SingleTurnPlayer
from plugin.environments.trajectory import Trajectory, failed
from plugin.errors import BatchError
from plugin.tasks.loading import load_task, load_tokenizer
from plugin.tasks.protocol import Prompt, as_reward

#: How long an idle engine waits for an environment before it looks for new requests.
_LOOK_SECONDS = 0.05


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
        """Raise: only the environment has seen the whole conversation."""
        raise BatchError("a response of a multi-turn task has no reward of its own")


@dataclass(eq=False)
class _Episode:
    """One trajectory while it is played.

    number: of its environment
    conversation: set when the episode begins
    result: the trajectory, once there is one
    """

    number: int
    index: int
    seed: int
    parameters: SamplingParameters
    conversation: Conversation = field(init=False)
    result: Trajectory | None = None


class MultiTurnPlayer:
    """A `Player` of conversations; each continues as soon as its own environment has answered.

    Nothing waits for a call of an environment but its own episode: the engine generates the replies
    of the others meanwhile. Over an engine that answers whole batches, all
    open conversations get their next reply in one call, then all environments take their step.
    """

    def __init__(
        self,
        stream: ResponseStream,
        *,
        task: MultiTurnTask,
        tokenizer: Any,
        config: JobConfig,
        environments: EnvironmentCalls | None = None,
    ) -> None:
        self._stream, self._task, self._config = stream, task, config
        self._renderer = renderer_of(task, tokenizer, config)
        self._groups: dict[int, list[_Episode]] = {}
        self._ready: list[_Episode] = []
        self._calls: EnvironmentCalls = environments or LocalEnvironments(
            task, seconds=config.environment_timeout, threads=config.environment_threads
        )
        self._numbers = itertools.count()
        #: What becomes of the result of a call; none for those of `close`.
        self._awaited: dict[int, tuple[_Episode, str, Callable[[_Episode, Any], None]]] = {}

    @property
    def open(self) -> int:
        """Groups that were begun and are not done."""
        return len(self._groups)

    def has_room(self, request: GenerationRequest, parameters: SamplingParameters) -> bool:
        """Whether no more episodes would be open than the engine generates at once."""
        episodes = [episode for group in self._groups.values() for episode in group]
        alike = all(episode.parameters == parameters for episode in episodes[:1])
        fits = len(episodes) + len(request.seeds) <= self._stream.max_batch
        return alike and (fits or not episodes)

    def begin(self, group: int, request: GenerationRequest, parameters: SamplingParameters) -> None:
        """Start the environments of a group."""
        episodes = [
            _Episode(next(self._numbers), request.prompt_index, seed, parameters)
            for seed in request.seeds
        ]
        self._groups[group] = episodes
        for episode in episodes:
            what = "starting the environment"
            self._call(episode, what, self._on_start, "start", episode.index, episode.seed)

    def step(self) -> list[PlayedGroup]:
        """Advance every episode that can continue; returns the groups that are done."""
        self._collect(0.0)
        while self._awaited and self._stream.lockstep:
            self._collect(_LOOK_SECONDS)
        self._request_replies()
        if self._stream.open:
            for episodes, place, answer in self._stream.step():
                with self._failing(episodes[place]):
                    self._on_reply(episodes[place], answer)
        elif self._awaited:
            self._collect(_LOOK_SECONDS)
        done = [n for n, group in self._groups.items() if all(e.result is not None for e in group)]
        return [(n, [e.result for e in self._groups.pop(n) if e.result is not None]) for n in done]

    def abort(self) -> None:
        """Drop what is open and close its environments."""
        self._stream.abort()
        self._awaited.clear()
        for group in self._groups.values():
            for episode in group:
                if episode.result is None:
                    self._end(episode, failed("not finished"))
        self._groups.clear()
        self._ready.clear()

    # -- replies

    def _request_replies(self) -> None:
        """Ask for the replies that are due; episodes with the same context are one request."""
        by_context: dict[tuple[int, tuple[int, ...]], list[_Episode]] = {}
        # In the order of the groups, whichever environment answered first.
        due = {id(episode) for episode in self._ready}
        for group in self._groups.values() if due else ():
            for episode in group:
                if id(episode) in due:
                    what = (episode.index, episode.conversation.context)
                    by_context.setdefault(what, []).append(episode)
        self._ready.clear()
        for (index, context), episodes in by_context.items():
            seeds = tuple(turn_seed(e.seed, e.conversation.turns) for e in episodes)
            request = GenerationRequest(context, seeds, index)
            self._stream.add(episodes, request, episodes[0].parameters)

    def _on_reply(self, episode: _Episode, answer: Answer) -> None:
        if isinstance(answer, GenerationFailure):
            self._end(episode, failed(answer.reason))
        elif answer.tokens.numel() == 0:
            self._end(episode, failed("empty response"))
        else:
            reply = episode.conversation.add_reply(answer)
            if answer.finish_reason == "length":
                self._score(episode, "reply_cut")
            else:
                history = tuple(episode.conversation.messages)
                what = "the environment's step"
                self._call(episode, what, self._on_step, "step", reply, history)

    # -- environments

    def _on_start(self, episode: _Episode, _: None) -> None:
        messages = self._task.messages(episode.index)
        chat = Conversation(messages, self._renderer, self._task.stop_token_ids)
        episode.conversation = chat
        if self._fits(episode):
            self._ready.append(episode)
        else:
            self._end(
                episode,
                failed(
                    f"the first context has {len(chat.context)} tokens, which leaves no room for a "
                    f"reply within --max-context-length {self._config.max_context_length}"
                ),
            )

    def _on_step(self, episode: _Episode, step: Any) -> None:
        """The next turn, or the end."""
        if not isinstance(step, Step):
            kind = type(step).__name__
            self._end(episode, failed(f"the environment's step is a {kind}; it must be a Step"))
        elif step.done:
            self._score(episode, "done")
        elif episode.conversation.turns >= self._config.max_turns:
            self._score(episode, "max_turns")
        else:
            episode.conversation.follow(step)
            if self._fits(episode):
                self._ready.append(episode)
            else:
                self._score(episode, "max_context")

    def _score(self, episode: _Episode, ending: Ending) -> None:
        self._call(episode, "the environment's reward", self._on_reward, "reward", ending)

    def _on_reward(self, episode: _Episode, reward: Any) -> None:
        value = as_reward(reward) if isinstance(reward, (int, float)) else None
        if value is None:
            text = reprlib.repr(reward)
            reason = f"the environment's reward is {text}; it must be a finite number"
            self._end(episode, failed(reason))
            return
        chat = episode.conversation
        played = Trajectory(chat.samples(), value, turns=chat.turns, truncated=chat.truncated)
        self._end(episode, played)

    def _end(self, episode: _Episode, result: Trajectory) -> None:
        """Record the result and close the environment, whose failure to do so changes nothing."""
        episode.result = result
        self._calls.submit(episode.number, "close")

    def _call(
        self,
        episode: _Episode,
        what: str,
        then: Callable[[_Episode, Any], None],
        method: Method,
        *arguments: Any,
    ) -> None:
        """Call an environment and pass its result to `then`; a failure ends the episode."""
        number = self._calls.submit(episode.number, method, *arguments)
        self._awaited[number] = (episode, what, then)

    def _collect(self, wait_seconds: float) -> None:
        for number, result in self._calls.finished(wait_seconds):
            awaited = self._awaited.pop(number, None)
            if awaited is None:
                continue
            episode, what, then = awaited
            if isinstance(result, CallFailure):
                self._end(episode, failed(f"{what}: {result.reason}"))
            else:
                with self._failing(episode):
                    then(episode, result)

    def _fits(self, episode: _Episode) -> bool:
        longest = self._config.max_context_length
        reply = episode.parameters.max_response_length
        return longest is None or len(episode.conversation.context) + reply <= longest

    @contextmanager
    def _failing(self, episode: _Episode) -> Iterator[None]:
        """Fail the episode on an exception in the body: of the template or the tokenizer."""
        try:
            yield
        except Exception as error:
            self._end(episode, failed(f"{type(error).__name__}: {error}"))


def choose_player(
    config: JobConfig, make_environments: Callable[[], EnvironmentCalls] | None = None
) -> Callable[[ResponseStream], Player]:
    """How an engine's actor turns requests into trajectories: in one turn, or in several.

    Only a task of the user's own can have several. The process that plays it renders its messages.

    make_environments: starts what its environments run in; none = threads of this process
    """
    if config.task_path is None:
        return SingleTurnPlayer
    tokenizer = load_tokenizer(config)
    task = load_task(config, tokenizer)
    if not isinstance(task, MultiTurnTask):
        return SingleTurnPlayer
    environments = None if make_environments is None else make_environments()
    return partial(
        MultiTurnPlayer, task=task, tokenizer=tokenizer, config=config, environments=environments
    )
