"""What can be found wrong with the task, its rewards, --eval-data and teachers before the start.

Of teachers above all that their vocabulary is the policy's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from plugin.cluster.model_source import ModelSource, directory_source
from plugin.config import JobConfig
from plugin.config.flags import expect
from plugin.config.teachers import TeacherSpec
from plugin.engines.choice import sampling_parameters
from plugin.engines.protocol import SamplingParameters
from plugin.environments.environment_protocol import MultiTurnTask
from plugin.environments.multi_turn import OpeningPrompts
from plugin.errors import ConfigError
from plugin.tasks.loading import load_dataset_task, load_task, load_tokenizer, tokenizer_in
from plugin.tasks.protocol import (
    FIRST_HELD_OUT,
    EvalSet,
    Prompt,
    Task,
    checked_prompt,
    checked_reward,
)
from plugin.teachers.http_teacher import HttpTeacher


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


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def checked_teachers(
    config: JobConfig, policy: ModelSource, tokenizer: Any, log: Callable[[str], None]
) -> dict[str, ModelSource]:
    """The teachers that the job loads, by name; a `ConfigError` for one that cannot teach.

    tokenizer: of the policy; log: prints a message
    """
    vocabulary = policy.hf_config["vocab_size"]
    k = config.distill_topk
    expect(
        k is None or k <= vocabulary,
        f"--distill-topk is {k}, and the model has {vocabulary} ids; lower it",
    )
    loaded = {}
    for spec in config.teacher_specs:
        if spec.directory is None:
            HttpTeacher(config, spec, vocabulary).check(tokenizer, log)
        else:
            loaded[spec.name] = _loaded(config, spec, policy, tokenizer)
    return loaded


def _loaded(
    config: JobConfig, spec: TeacherSpec, policy: ModelSource, tokenizer: Any
) -> ModelSource:
    assert spec.directory is not None
    source = directory_source(spec.directory, spec.option, config)
    longest = source.hf_config.get("max_position_embeddings")
    ours = policy.hf_config.get("max_position_embeddings")
    wanted = config.max_context_length or config.max_prompt_length + config.max_response_length
    wanted = min(wanted, ours or wanted)
    expect(
        longest is None or longest >= wanted,
        f"{spec.option} has {longest} positions, and prompt and response may have {wanted} tokens; "
        "lower --max-response-length, or use another teacher",
    )
    directory = Path(source.directory or spec.directory)
    theirs, size = source.hf_config["vocab_size"], policy.hf_config["vocab_size"]
    has_own = config.hf_checkpoint is not None
    if has_own and any((directory / name).is_file() for name in _TOKENIZER_FILES):
        _compare_tokenizers(spec, tokenizer, tokenizer_in(str(directory), spec.option))
        ids = max(tokenizer.get_vocab().values()) + 1
        expect(
            theirs >= max(ids, config.distill_topk or 0),
            f"{spec.option} {spec.directory} has logits for {theirs} ids, and the tokenizer has "
            f"{ids}, --distill-topk {config.distill_topk}; use a teacher with at least as many",
        )
        return source
    expect(
        theirs == size,
        f"{spec.option} has a vocabulary of {theirs} tokens, the policy of {size}; log-probs of "
        "the same tokens can be compared only with one tokenizer",
    )
    return source


def _compare_tokenizers(spec: TeacherSpec, ours: Any, theirs: Any) -> None:
    """Refuse a tokenizer with other ids; sizes of embeddings may differ, they are padded."""
    mine, other = ours.get_vocab(), theirs.get_vocab()
    if mine == other:
        return
    different = sorted(
        (token for token in mine.keys() | other.keys() if mine.get(token) != other.get(token)),
        key=lambda token: (mine.get(token, len(mine)), token),
    )
    token = different[0]
    here, there = (
        "no id" if number is None else f"the id {number}"
        for number in (mine.get(token), other.get(token))
    )
    raise ConfigError(
        f"{spec.option} has a different vocabulary: {token!r} has {here} in the policy's tokenizer "
        f"and {there} in the teacher's, {len(different)} tokens differ; log-probs of the same "
        "tokens can be compared only with one tokenizer: use a teacher that has it"
    )
