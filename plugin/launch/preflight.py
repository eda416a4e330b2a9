"""Everything that can be found wrong before an actor starts: hooks, task, models, log-probs, routes."""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import dataclass
from typing import Any

from plugin.config import JobConfig
from plugin.config.import_paths import load_function
from plugin.errors import ConfigError
from plugin.launch.model_source import (
    ModelSource,
    directory_source,
    load_tokenizer,
    policy_source,
)
from plugin.loss.objective import check_loss
from plugin.loss.separable_loss import takes_separable_head
from plugin.rollout.conversation.environment_protocol import MultiTurnTask
from plugin.rollout.conversation.multi_turn import OpeningPrompts
from plugin.rollout.engines.choice import check_engine
from plugin.rollout.engines.expert_routes import moe_layers
from plugin.rollout.engines.protocol import SamplingParameters
from plugin.rollout.tasks.copy_digits import CopyDigitsTask
from plugin.rollout.tasks.jsonl import JsonlTask
from plugin.rollout.tasks.protocol import Task, checked_prompt, checked_reward, require_task


@dataclass(frozen=True)
class JobParts:
    """What the driver holds once everything has been checked."""

    task: Task
    policy: ModelSource
    reference: ModelSource | None
    teacher: ModelSource | None
    sampling: SamplingParameters
    route_shape: tuple[int, int, int] | None


def check_job(config: JobConfig) -> JobParts:
    """Loads and tries out what the configuration names; raises on the first thing that cannot work."""
    check_loss(config)
    takes_separable_head(config, config.tensor_model_parallel_size)
    if config.use_wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError("--use-wandb: the wandb package is not installed; pip install wandb")
    check_engine(config)
    policy = policy_source(config)
    task = _tried_task(config)
    _check_lengths(config, policy)
    return JobParts(
        task=task,
        policy=policy,
        reference=_reference(config, policy),
        teacher=_teacher(config, policy),
        sampling=sampling_parameters(config, task),
        route_shape=_route_shape(config, policy),
    )


def _tried_task(config: JobConfig) -> Task:
    """The task as the driver uses it, after one prompt and, where the task itself scores, one reward."""
    tokenizer = load_tokenizer(config)
    task = load_task(config, tokenizer)
    if isinstance(task, MultiTurnTask):
        prompts = OpeningPrompts(task, tokenizer, config)
        checked_prompt(prompts, 0, config.max_prompt_length)
        return prompts
    first = checked_prompt(task, 0, config.max_prompt_length)
    checked_reward(task, first, list(task.stop_token_ids)[:1])
    return task


def load_task(config: JobConfig, tokenizer: Any) -> Task | MultiTurnTask:
    """The task that the configuration names, or the built-in one."""
    if config.task_path is not None:
        factory = load_function(config.task_path)
        return require_task(factory(config, tokenizer), config.task_path)
    if config.prompt_data is not None:
        path = config.reward_function_path
        return JsonlTask(
            config.prompt_data,
            tokenizer,
            reward_function=None if path is None else load_function(path),
            apply_chat_template=config.apply_chat_template,
            seed=config.seed,
        )
    if config.hf_checkpoint is not None:
        raise ConfigError(
            f"--hf-checkpoint {config.hf_checkpoint} has nothing to train on; add --prompt-data or --task-path"
        )
    return CopyDigitsTask(tokenizer, seed=config.seed)


def sampling_parameters(config: JobConfig, task: Task | MultiTurnTask) -> SamplingParameters:
    """How the engines sample; log-probs are turned on, with a warning, where a feature needs them."""
    log_probs = config.return_rollout_log_probs
    needing = config.needs_rollout_log_probs()
    if needing and not log_probs:
        warnings.warn(
            f"{', '.join(needing)} needs the engine's log-probs, so they are turned on although "
            "--no-return-rollout-log-probs was given",
            stacklevel=2,
        )
        log_probs = True
    return SamplingParameters(
        temperature=config.rollout_temperature,
        top_p=config.rollout_top_p,
        top_k=config.rollout_top_k,
        max_response_length=config.max_response_length,
        stop_token_ids=task.stop_token_ids,
        log_probs=log_probs,
        routed_experts=config.wants_rollout_routes,
    )


def _reference(config: JobConfig, policy: ModelSource) -> ModelSource | None:
    if not config.use_kl_loss:
        return None
    if config.ref_hf_checkpoint is None:
        return policy
    source = directory_source(config.ref_hf_checkpoint, "--ref-hf-checkpoint")
    return _same_vocabulary(source, policy, f"--ref-hf-checkpoint {config.ref_hf_checkpoint}")


def _teacher(config: JobConfig, policy: ModelSource) -> ModelSource | None:
    if config.teacher_hf_checkpoint is None:
        return None
    source = directory_source(config.teacher_hf_checkpoint, "--teacher-hf-checkpoint")
    return _same_vocabulary(
        source, policy, f"--teacher-hf-checkpoint {config.teacher_hf_checkpoint}"
    )


def _same_vocabulary(source: ModelSource, policy: ModelSource, name: str) -> ModelSource:
    theirs, ours = source.hf_config["vocab_size"], policy.hf_config["vocab_size"]
    if theirs != ours:
        raise ConfigError(
            f"{name} has a vocabulary of {theirs} tokens, the policy of {ours}; log-probs of the same tokens can "
            "be compared only with one tokenizer"
        )
    return source


def _check_lengths(config: JobConfig, policy: ModelSource) -> None:
    longest = policy.hf_config.get("max_position_embeddings")
    if longest is not None and config.max_response_length >= longest:
        raise ConfigError(
            f"--max-response-length is {config.max_response_length}, the model has {longest} positions for prompt "
            "and response together; lower it"
        )
    context = config.max_context_length
    if longest is not None and context is not None and context > longest:
        raise ConfigError(
            f"--max-context-length is {context}, the model has {longest} positions; lower it"
        )


def _route_shape(config: JobConfig, source: ModelSource) -> tuple[int, int, int] | None:
    """(MoE layers, experts per token, experts) of a MoE model; a flag about routes without one is an error."""
    hf_config = source.as_config()
    experts = getattr(hf_config, "num_experts", 0)
    if not experts:
        if config.looks_at_routes:
            raise ConfigError(
                f"routing replay or --detect-routing with a {hf_config.model_type} model, which has no experts; drop the flag or use a "
                "MoE model (--embedded-model qwen3_moe builds a tiny one)"
            )
        return None
    return len(moe_layers(hf_config.to_dict())), hf_config.num_experts_per_tok, experts
