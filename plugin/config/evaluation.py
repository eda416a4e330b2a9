"""Flags of evaluation: on what, how often, how it samples and what is reported."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from plugin.config.flags import FlagGroup, absolute_path, expect, needs_flag, runtime_flag

if TYPE_CHECKING:
    from plugin.config.job_config import JobConfig

_eval_flag = partial(runtime_flag, needs=needs_flag("eval_data"))
_shown_flag = partial(_eval_flag, common_in="eval")


@dataclass(frozen=True)
class EvalFlags(FlagGroup):
    title: ClassVar[str] = "evaluation"

    eval_data: tuple[str, ...] = runtime_flag(
        (),
        "NAME:PATH evaluates on the rows of PATH, in the format of --prompt-data; NAME:N on N "
        "held-out prompts of the task",
        path=lambda given: _absolute_rows(given),
        common_in="train eval",
    )
    eval_interval: int | None = _eval_flag(
        None, "rollouts between evaluations; none = at the start and at the end only", at_least=1
    )
    eval_at_start: bool = _eval_flag(True, "also evaluate before the first rollout")
    n_samples_per_eval_prompt: int = _shown_flag(1, "responses per prompt", at_least=1)
    eval_temperature: float | None = _shown_flag(
        None,
        "0 = greedy; none = greedy with one response per prompt, --rollout-temperature with "
        "several",
        at_least=0,
    )
    eval_top_p: float = _shown_flag(1.0, "nucleus sampling; 1 = off", above=0, at_most=1)
    eval_max_response_length: int | None = _shown_flag(
        None, "tokens a response may have; none = --max-response-length", at_least=1
    )
    eval_pass_at: str | None = _shown_flag(
        None,
        "values of k of pass@k, separated by commas; none = powers of two up to the responses per "
        "prompt",
    )
    eval_pass_reward: float = _shown_flag(
        1.0, "a response with at least this reward counts as correct in pass@k"
    )
    keep_best: bool = _eval_flag(
        False,
        "besides the newest checkpoints keep the one with the best mean on the first --eval-data, "
        "as checkpoints/best",
    )

    @property
    def eval_sets(self) -> list[tuple[str, str | int]]:
        """Name, and path or number of prompts, of every --eval-data."""
        return [_named(given) for given in self.eval_data]

    @property
    def pass_at(self) -> list[int]:
        """The values of k of pass@k."""
        n = self.n_samples_per_eval_prompt
        if self.eval_pass_at is None:
            return [k for k in (1 << p for p in range(n.bit_length())) if k <= n]
        words = [word.strip() for word in self.eval_pass_at.split(",")]
        wrong = [word for word in words if not word.isdecimal()]
        expect(
            not wrong,
            f"--eval-pass-at is {self.eval_pass_at!r}; expected numbers separated by commas, such "
            "as 1,8",
        )
        return sorted({int(word) for word in words})


def check_evaluation(config: JobConfig) -> None:
    """Raise a `ConfigError` for evaluation settings that contradict each other or other flags."""
    n, temperature = config.n_samples_per_eval_prompt, config.eval_temperature
    names = [name for name, _ in config.eval_sets]
    doubled = [name for name in names if names.count(name) > 1]
    expect(not doubled, f"--eval-data names {doubled[:1]} twice; give every set its own name")
    expect(
        temperature != 0 or n == 1,
        f"--n-samples-per-eval-prompt is {n} with --eval-temperature 0: greedy responses to "
        "a prompt are all the same; ask for 1, or raise the temperature",
    )
    lowest = config.sampling_traits.lowest_temperature
    expect(
        not temperature or temperature >= lowest,
        f"--eval-temperature is {temperature}; vLLM silently raises temperatures below {lowest}; "
        "choose 0 or at least that",
    )
    for k in config.pass_at:
        expect(
            1 <= k <= n,
            f"--eval-pass-at holds {k}, and pass@k needs at least k of the "
            f"{n} responses per prompt; raise --n-samples-per-eval-prompt or drop it",
        )
    for name, rows in config.eval_sets:
        expect(
            isinstance(rows, str) or config.prompt_data is None,
            f"--eval-data {name}:{rows} asks for {rows} held-out prompts, and --prompt-data has "
            f"none; give the path of other rows, {name}:PATH",
        )
        expect(
            isinstance(rows, int)
            or (config.hf_checkpoint is not None and config.task_path is None),
            f"--eval-data {name}:{rows} needs the tokenizer of --hf-checkpoint and the rewards "
            "of --prompt-data; with a task, evaluate on prompts of its own, such as "
            f"{name}:64",
        )


def _absolute_rows(given: str) -> str:
    name, rows = _named(given)
    return f"{name}:{rows if isinstance(rows, int) else absolute_path(rows)}"


def _named(given: str) -> tuple[str, str | int]:
    name, _, rows = given.partition(":")
    expect(
        re.fullmatch(r"[\w.-]+", name) is not None and rows != "",
        f"--eval-data is {given!r}; expected NAME:PATH, or NAME:N for N prompts of the task",
    )
    if not rows.isdecimal():
        return name, rows
    expect(int(rows) > 0, f"--eval-data {given}: ask for at least one prompt")
    return name, int(rows)
