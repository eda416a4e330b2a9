"""What can be found wrong with the task, its rewards and --eval-data before the job starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plugin.config import JobConfig
from plugin.engines.choice import sampling_parameters
from plugin.engines.protocol import SamplingParameters
from plugin.environments.environment_protocol import MultiTurnTask
from plugin.environments.multi_turn import OpeningPrompts
from plugin.errors import ConfigError
from plugin.tasks.loading import load_dataset_task, load_task, load_tokenizer
from plugin.tasks.protocol import (
    FIRST_HELD_OUT,
    EvalSet,
    Prompt,
    Task,
    checked_prompt,
    checked_reward,
)


def checked_task(
    config: JobConfig, tokenizer: Any, log: Callable[[str], None], vocab_size: int
) -> Task:
    """The task as the driver uses it, tried with one prompt and, where it scores, one reward."""
    task = load_task(config, tokenizer, log)
    if isinstance(task, MultiTurnTask):
        if config.reward_timeout != JobConfig.reward_timeout:
            raise ConfigError(
                f"--reward-timeout is {config.reward_timeout:g}, but the environments of "
                "--task-path give the rewards; use --environment-timeout"
            )
        if config.overlong_buffer_length is not None:
            raise ConfigError(
                f"--overlong-buffer-length {config.overlong_buffer_length} penalizes the length of "
                "one response, and --task-path plays several turns; put the penalty into the "
                "rewards of its environments"
            )
        prompts = OpeningPrompts(task, tokenizer, config)
        _require_vocabulary(checked_prompt(prompts, 0, config.max_prompt_length), vocab_size)
        return prompts
    _try_single_turn(task, config, vocab_size)
    return task


def _try_single_turn(task: Task, config: JobConfig, vocab_size: int) -> None:
    first = checked_prompt(task, 0, config.max_prompt_length)
    _require_vocabulary(first, vocab_size)
    checked_reward(task, first, list(task.stop_token_ids)[:1], config.reward_timeout)


def evaluation_parts(
    config: JobConfig, vocab_size: int, log: Callable[[str], None]
) -> tuple[tuple[EvalSet, ...], SamplingParameters]:
    """The sets of --eval-data and how training samples, for an evaluation by itself."""
    task, tokenizer = None, load_tokenizer(config)
    if any(isinstance(rows, int) for _, rows in config.eval_sets):
        task = checked_task(config, tokenizer, log, vocab_size)
    sets = checked_eval_sets(config, tokenizer, task, log, vocab_size)
    return sets, sampling_parameters(config, sets[0].task.stop_token_ids)


def checked_eval_sets(
    config: JobConfig,
    tokenizer: Any,
    task: Task | None,
    log: Callable[[str], None],
    vocab_size: int,
) -> tuple[EvalSet, ...]:
    """The sets of --eval-data; each is tried like the task."""
    found = []
    for name, rows in config.eval_sets:
        if isinstance(rows, int):
            assert task is not None
            one = EvalSet(name, task, rows, FIRST_HELD_OUT)
            _require_vocabulary(
                checked_prompt(task, one.first, config.max_prompt_length), vocab_size
            )
        else:
            own = config.unchecked_copy(prompt_data=rows, shuffle_data=False)
            data = load_dataset_task(own, tokenizer, log, "--eval-data")
            _try_single_turn(data, config, vocab_size)
            one = EvalSet(name, data, len(data.data))
        if one.rows == 1:
            log(f"--eval-data {name} has one prompt: its scores say little about others")
        found.append(one)
    return tuple(found)


def _require_vocabulary(prompt: Prompt, vocab_size: int) -> None:
    outside = [token for token in prompt.tokens if not 0 <= token < vocab_size]
    if outside:
        raise ConfigError(
            f"prompt 0 holds token {outside[0]}, and the model has {vocab_size}; use the model's "
            "own tokenizer"
        )
