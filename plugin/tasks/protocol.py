"""What a task is: numbered prompts and a reward for each response.

A task named with `--task-path` is called as `factory(config, tokenizer)` and returns an object with
the methods of `Task`, or of `MultiTurnTask` (see `environment_protocol`). Naming a task runs its
code.
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Protocol, runtime_checkable

from plugin.config.import_paths import try_on_example
from plugin.environments.deadline_calls import CallFailure, calls_here
from plugin.environments.environment_protocol import MultiTurnTask
from plugin.errors import BatchError, ConfigError

_LARGEST_FLOAT32 = 3.4028234663852886e38


class Tokenizer(Protocol):
    """The tokenizer interface that a task needs; Hugging Face tokenizers have it."""

    eos_token_id: int

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids."""
        ...


@dataclass(frozen=True)
class Prompt:
    """A prompt's token ids and whatever the task needs to score a response to it."""

    tokens: tuple[int, ...]
    data: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Task(Protocol):
    """Prompts by number, so that a run can be resumed at one; rewards by response."""

    stop_token_ids: tuple[int, ...]

    def prompt(self, index: int) -> Prompt:
        """Prompt number `index`, from 0 on without end; the same number gives the same prompt."""
        ...

    def reward(self, prompt: Prompt, response: Sequence[int]) -> float:
        """The reward of the response's token ids, which include the stop token if there is one.

        With --reward-workers it is called in other processes, each with a task of its own.
        """
        ...


#: Prompts of a task from this number on are for evaluation; no rollout gets so far.
FIRST_HELD_OUT = 1 << 40


@dataclass(frozen=True)
class EvalSet:
    """`rows` prompts of `task` for evaluation, from number `first` on."""

    name: str
    task: Task
    rows: int
    first: int = 0


def require_task(candidate: Any, path: str) -> Task | MultiTurnTask:
    """`candidate` if it is a task, or a `ConfigError` that names the members it lacks."""
    if isinstance(candidate, (Task, MultiTurnTask)):
        return candidate
    several_turns = hasattr(candidate, "environment") or hasattr(candidate, "messages")
    one = ("stop_token_ids", "prompt", "reward")
    wanted = ("stop_token_ids", "tools", "messages", "environment") if several_turns else one
    missing = [name for name in wanted if not hasattr(candidate, name)]
    raise ConfigError(
        f"--task-path {path} made a {type(candidate).__name__} without {', '.join(missing)}; a "
        "task has stop_token_ids, prompt(index) and reward(prompt, response), or for several "
        "turns stop_token_ids, tools, messages(index) and environment(index, seed)"
    )


def checked_prompt(task: Task, index: int, max_length: int) -> Prompt:
    """Prompt `index`; a `BatchError` if it is not a prompt, empty or too long.

    What the task raises becomes a `HookLoadError` with the place in its code.
    """
    prompt = try_on_example(f"prompt {index} of the task failed", task.prompt, index)
    tokens = getattr(prompt, "tokens", None)
    if not isinstance(tokens, Sequence) or not all(isinstance(t, Integral) for t in tokens):
        raise BatchError(
            f"prompt {index} of the task is {reprlib.repr(prompt)}; it must be a Prompt whose "
            "tokens are a tuple of token ids"
        )
    if not 1 <= len(tokens) <= max_length:
        raise BatchError(
            f"prompt {index} has {len(tokens)} tokens; it must have between 1 and "
            f"{max_length}; shorten it or raise --max-prompt-length"
        )
    checked: Prompt = prompt
    return checked


def checked_reward(
    task: Task, prompt: Prompt, response: Sequence[int], seconds: float = 60.0
) -> float:
    """The reward as a finite number, or a `BatchError` that shows the response.

    A reward that raises, or takes longer than `seconds`, is such an error too.
    """
    with calls_here(seconds) as call:
        return reward_by(call, task, prompt, response)


def reward_by(
    call: Callable[[Callable[[], Any]], Any], task: Task, prompt: Prompt, response: Sequence[int]
) -> float:
    """`checked_reward` through `call`, which `calls_here` gives and many rewards can share."""
    reward = call(functools.partial(task.reward, prompt, response))
    value = None if isinstance(reward, CallFailure) else as_reward(reward)
    if value is not None:
        return value
    shown = f"the task's reward for response {list(response)[:20]}"
    if isinstance(reward, CallFailure):
        raise BatchError(f"{shown} failed: {reward.reason}")
    raise BatchError(f"{shown} is {reprlib.repr(reward)}; it must be a finite number")


def as_reward(value: Any) -> float | None:
    """A reward as a number that float32 can hold; None if it is not one."""
    try:
        number = float(value)
    except Exception:  # of whatever type the value has
        return None
    return number if abs(number) <= _LARGEST_FLOAT32 else None
