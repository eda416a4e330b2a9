"""The rewards of a job: which functions, with which weights, and what each is called with."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from plugin.config import JobConfig
from plugin.config.data import RewardSpec, parse_rewards
from plugin.config.import_paths import load_function
from plugin.config.loss.loss_config import estimator_traits
from plugin.errors import BatchError, ConfigError, HookLoadError
from plugin.rewards.built_in import BUILT_IN, DETERMINISTIC
from plugin.rewards.code_tests import strongest_isolation
from plugin.tasks.prompt_format import lookup, no_column
from plugin.tasks.protocol import Prompt, as_reward


@dataclass(frozen=True)
class RewardInput:
    """What a reward may ask for besides the row, by the names of its keyword arguments.

    response: the text without the stop token
    label: the value of --label-key; None where the row has none
    prompt: its text as the model saw it
    num_tokens: of the response, with the stop token
    truncated: whether the response was cut at --max-response-length
    """

    response: str
    row: Mapping[str, Any]
    prompt: str = ""
    num_tokens: int = 0
    truncated: bool = False


@dataclass(frozen=True)
class Score:
    """What a response is worth: the weighted sum, and each reward before its weight."""

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardSet:
    """Rewards by name, as they are sent to another process, which then loads them.

    constants: further values that a reward may ask for: max_response_length, timeout, url,
        isolation (of `code_tests`)
    """

    specs: tuple[RewardSpec, ...]
    label_key: str = "answer"
    constants: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: JobConfig) -> RewardSet:
        """The rewards that the flags name; `exact` if they name none and one is needed."""
        specs = config.reward_specs
        constants = {
            "max_response_length": config.max_response_length,
            "timeout": config.reward_timeout,
            "url": config.reward_url,
        }
        if not specs and estimator_traits(config.advantage_estimator).rewards:
            specs = parse_rewards(("exact",))
        if any(spec.reward == "code_tests" for spec in specs):
            # Decided here: no worker falls back to less than what is said at the start.
            constants["isolation"] = strongest_isolation()
        return cls(specs, config.label_key, constants)

    def timed_out(self, given: RewardInput) -> Score | None:
        """The score of a response on which time ran out: wrong, if another try would end so too.

        None if a reward is the user's own, or a server's: it may have an answer the next time.
        """
        if any(spec.reward not in DETERMINISTIC for spec in self.specs):
            return None
        parts = {spec.name: 0.0 for spec in self.specs}
        if "length_penalty" in parts:
            longest = self.constants["max_response_length"]
            parts["length_penalty"] = -given.num_tokens / longest
        return Score(sum(spec.weight * parts[spec.name] for spec in self.specs), parts)

    def load(self) -> Rewards:
        """The functions; a `HookLoadError` or `ConfigError` if one cannot be used."""
        return Rewards(self)


class Rewards:
    """The functions of a `RewardSet`, loaded."""

    def __init__(self, chosen: RewardSet) -> None:
        self._set = chosen
        self._functions = [_loaded(spec) for spec in chosen.specs]
        known = {"label", "prompt", "num_tokens", "truncated", *chosen.constants}
        self._asked = [
            _keywords(spec, function, known)
            for spec, function in zip(chosen.specs, self._functions, strict=True)
        ]
        self.asks_prompt = any("prompt" in asked for asked in self._asked)

    def import_libraries(self) -> None:
        """Import now what the functions would import when they are first called."""
        if any(spec.reward == "boxed" for spec in self._set.specs):
            importlib.import_module("math_verify")

    def label_problem(self, row: Mapping[str, Any]) -> str | None:
        """Why the row's label cannot be used by one of the rewards; None if it can."""
        key = self._set.label_key
        for spec, asked in zip(self._set.specs, self._asked, strict=True):
            _, problem_of = BUILT_IN.get(spec.reward, (None, None))
            # The user's own function, and a server, may do without.
            if "label" not in asked or problem_of is None:
                continue
            try:
                label = lookup(row, key)
            except KeyError:
                return no_column(row, key, "--label-key")
            problem = problem_of(label)
            if problem is not None:
                return f"the label {key!r} does not fit --reward {spec.reward}: {problem}"
        return None

    def score(self, given: RewardInput) -> Score:
        """The rewards of a response; a `BatchError` if one is no finite number."""
        try:
            label = lookup(given.row, self._set.label_key)
        except KeyError:
            label = None
        values = {
            "label": label,
            "prompt": given.prompt,
            "num_tokens": given.num_tokens,
            "truncated": given.truncated,
            **self._set.constants,
        }
        parts: dict[str, float] = {}
        for spec, function, asked in zip(
            self._set.specs, self._functions, self._asked, strict=True
        ):
            value = function(given.response, given.row, **{name: values[name] for name in asked})
            number = as_reward(value)
            if number is None:
                raise BatchError(
                    f"reward {spec.name} is {reprlib.repr(value)}; it must be a finite number"
                )
            parts[spec.name] = number
        total = sum(spec.weight * parts[spec.name] for spec in self._set.specs)
        if as_reward(total) is None:
            raise BatchError(f"the weighted sum of the rewards {parts} is not finite")
        return Score(total, parts)


class TextTask(Protocol):
    """What is needed to turn a response into text."""

    tokenizer: Any
    stop_token_ids: tuple[int, ...]


def reward_input(
    task: TextTask,
    prompt: Prompt,
    response: Sequence[int],
    *,
    truncated: bool = False,
    with_prompt: bool = False,
) -> RewardInput:
    """A response's token ids as rewards receive them; the text has no stop tokens."""
    kept = [token for token in response if token not in task.stop_token_ids]
    decode = task.tokenizer.decode
    asked = decode(list(prompt.tokens)) if with_prompt else ""
    return RewardInput(decode(kept), prompt.data, asked, len(response), truncated)


def enforced_limits(chosen: RewardSet) -> str | None:
    """A notice on how generated programs are limited; None if no program is run."""
    if all(spec.reward != "code_tests" for spec in chosen.specs):
        return None
    return (
        "--reward code_tests runs programs that the model writes, limited in time, memory and size "
        f"of files: {_ISOLATION_NOTICES[strongest_isolation()]}"
    )


_ISOLATION_NOTICES = {
    "namespaces": "in namespaces of their own, without network, the job's files and processes",
    "user": "as user nobody, because this machine makes no namespaces: the NETWORK and files that "
    "everybody may read ARE IN REACH",
    "none": "as this user, because this machine makes no namespaces: the NETWORK, the FILES AND "
    "THE PROCESSES of this user ARE IN REACH; use a user or a container of its own for the job",
}


def _loaded(spec: RewardSpec) -> Callable[..., float]:
    if spec.reward == "boxed" and importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            "--reward boxed needs the package math-verify; pip install 'megatron-tis[math]'"
        )
    function, _ = BUILT_IN.get(spec.reward, (None, None))
    return function or load_function(spec.reward)


def _keywords(spec: RewardSpec, function: Callable[..., Any], known: set[str]) -> tuple[str, ...]:
    """The values that a function asks for besides response and row."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # of compiled code
        return ()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
    any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    rest = [p for p in parameters if p not in named[:2]]
    fixed = [p for p in rest if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    asked = [p.name for p in fixed if p.default is p.empty or p.name in known]
    unknown = [name for name in asked if name not in known]
    if (len(named) < 2 and not any_number) or unknown:
        what = f"asks for {unknown[0]!r}" if unknown else "does not take (response, row)"
        raise HookLoadError(
            f"--reward {spec.reward} {what}; a reward is fn(response, row) and may name further "
            f"arguments among {', '.join(sorted(known))}"
        )
    return tuple(asked)
