"""The task and the tokenizer that a configuration names, in whichever process needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from plugin.config import JobConfig
from plugin.config.import_paths import load_called_with, try_on_example
from plugin.environments.environment_protocol import MultiTurnTask
from plugin.errors import ConfigError
from plugin.rewards.reward_set import RewardSet, enforced_limits
from plugin.tasks.copy_digits import ALPHABET, CharacterTokenizer, CopyDigitsTask
from plugin.tasks.prompt_data import DatasetTask, PromptDataset
from plugin.tasks.prompt_format import PromptFormat, lookup, no_column
from plugin.tasks.protocol import Task, require_task


def load_tokenizer(config: JobConfig) -> Any:
    """The policy's tokenizer."""
    if config.hf_checkpoint is None:
        return CharacterTokenizer(ALPHABET)
    return tokenizer_in(config.hf_checkpoint, f"--hf-checkpoint {config.hf_checkpoint}")


def tokenizer_in(directory: str, option: str) -> Any:
    """The tokenizer in a Hugging Face directory, which `option` names."""
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} has no usable tokenizer: {error}") from error


def load_task(
    config: JobConfig, tokenizer: Any, log: Callable[[str], None] = print
) -> Task | MultiTurnTask:
    """The task that the configuration names, or the built-in one."""
    if config.task_path is not None:
        factory = load_called_with("--task-path", config.task_path, "config", "tokenizer")
        what = f"--task-path {config.task_path} made no task"
        return require_task(try_on_example(what, factory, config, tokenizer), config.task_path)
    renders = config.prompt_data is not None and config.apply_chat_template
    if config.chat_template_kwargs is not None and not renders:
        raise ConfigError(
            f"--chat-template-kwargs {config.chat_template_kwargs} would do nothing, because no "
            "chat template is rendered; add --prompt-data with --apply-chat-template, or drop it"
        )
    if config.prompt_data is not None:
        return load_dataset_task(config, tokenizer, log)
    if config.hf_checkpoint is not None:
        raise ConfigError(
            f"--hf-checkpoint {config.hf_checkpoint} has nothing to train on; add --prompt-data or "
            "--task-path"
        )
    return CopyDigitsTask(tokenizer, seed=config.seed)


def load_dataset_task(
    config: JobConfig, tokenizer: Any, log: Callable[[str], None], option: str = "--prompt-data"
) -> DatasetTask:
    """The rows of `config.prompt_data`, which `option` names, with their rewards."""
    assert config.prompt_data is not None
    rewards = RewardSet.of(config)
    data = PromptDataset(
        config.prompt_data,
        tokenizer,
        PromptFormat.of(config),
        row_problem=_row_problem(config, rewards, option),
        max_prompt_length=config.max_prompt_length,
        bad_rows=config.bad_rows,
        shuffle=config.shuffle_data,
        seed=config.seed,
        log=log,
        option=option,
    )
    limits = enforced_limits(rewards)
    if limits is not None:
        log(limits)
    return DatasetTask(data, tokenizer, rewards)


def _row_problem(
    config: JobConfig, rewards: RewardSet, option: str
) -> Callable[[Mapping[str, Any]], str | None]:
    """The problem of a row's label or teacher; evaluation uses no teacher."""
    label_problem = rewards.load().label_problem
    key, names = config.teacher_key, [spec.name for spec in config.teacher_specs]
    if option != "--prompt-data" or key is None:
        return label_problem

    def teacher_problem(row: Mapping[str, Any]) -> str | None:
        try:
            name = lookup(row, key)
        except KeyError:
            return no_column(row, key, "--teacher-key")
        if name in names:
            return None
        return f"its teacher {key!r} is {str(name)[:100]!r}; --teachers names {', '.join(names)}"

    return lambda row: label_problem(row) or teacher_problem(row)
