"""What can be found wrong before an actor starts: hooks, estimator, engine, task, models."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from plugin.cluster.model_source import (
    ModelSource,
    directory_source,
    load_tokenizer,
    policy_source,
)
from plugin.cluster.placement import check_machine
from plugin.cluster.ray_cluster import check_address
from plugin.config import JobConfig
from plugin.config.import_paths import load_called_with, try_on_example
from plugin.controller.preflight.memory_check import (
    count_weights,
    least_bytes,
    refuse_what_cannot_fit,
)
from plugin.controller.preflight.teacher_checks import checked_teachers, teacher_problem
from plugin.engines.choice import check_engine, check_engine_size
from plugin.engines.expert_routes import RouteShape
from plugin.engines.protocol import SamplingParameters
from plugin.environments.environment_protocol import MultiTurnTask
from plugin.environments.multi_turn import OpeningPrompts
from plugin.errors import ConfigError, HookLoadError
from plugin.loss.objective import check_loss
from plugin.loss.separable_loss import takes_separable_head
from plugin.megatron_backend.hf_weights.files import HfDirectory
from plugin.megatron_backend.model.families import is_extra_layer
from plugin.observe.detectors import load_detectors
from plugin.ppo_utils.advantages import ESTIMATORS
from plugin.rewards.reward_set import RewardSet, enforced_limits
from plugin.tasks.copy_digits import CopyDigitsTask
from plugin.tasks.dataset_task import DatasetTask
from plugin.tasks.eval_set import FIRST_HELD_OUT, EvalSet
from plugin.tasks.prompt_data import PromptDataset
from plugin.tasks.prompt_format import PromptFormat
from plugin.tasks.protocol import Prompt, Task, checked_prompt, checked_reward, load_own_task


@dataclass(frozen=True)
class JobParts:
    """What the driver holds once everything has been checked.

    tokenizer: of the policy
    teachers: those that the ranks build, by name
    data: the rows of --prompt-data, where the task has them
    """

    task: Task
    tokenizer: Any
    policy: ModelSource
    reference: ModelSource | None
    teachers: dict[str, ModelSource]
    critic: ModelSource | None
    sampling: SamplingParameters
    route_shape: tuple[int, int, int] | None
    data: PromptDataset | None = None
    eval_sets: tuple[EvalSet, ...] = ()


def check_job(
    config: JobConfig,
    say: Callable[[str], None] = print,
    begin: Callable[[str], None] = lambda _: None,
) -> JobParts:
    """Load and try what the configuration names; raise on the first thing that cannot work.

    say: prints a message for a person; begin: told the name of each check before it runs
    """
    begin("machine" if config.address is None else "cluster address")
    if config.address is None:
        check_machine(config, cores=os.cpu_count() or 1, gpus=torch.cuda.device_count())
    else:
        check_address(config.address)
    begin("loss and corrections")
    check_loss(config)
    takes_separable_head(config, config.tensor_model_parallel_size)
    _try_estimator(config)
    begin("outputs and detectors")
    load_detectors(config.custom_detector_path)
    if config.use_wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError("--use-wandb: the wandb package is not installed; pip install wandb")
    begin("rollout engine")
    check_engine(config)
    factory = config.engine_traits.factory
    load_called_with("--rollout-engine", factory, "config", "hf_config", "name")
    begin("models and parallel layout")
    policy = policy_source(config)
    check_engine_size(config, policy.hf_config)
    check_lengths(config, policy)
    check_memory(config, policy)
    _check_answer_size(config, policy)
    reference = _other_policy(config, "--ref-hf-checkpoint", policy)
    critic = _other_policy(config, "--critic-hf-checkpoint", policy) or policy
    route_shape = _route_shape(config, policy)
    if config.replays_route_weights and config.router_gradient == "stop":
        say(
            "--use-rollout-routing-replay ids+weights: the routers get no gradient and stay as "
            "they are; --router-gradient keep trains them"
        )
    vocabulary = policy.hf_config["vocab_size"]
    tokenizer = load_tokenizer(config)
    if config.teacher_specs:
        begin("teachers")
    teachers = checked_teachers(config, policy, tokenizer, say)
    begin("task and reward")
    task = _tried_task(config, tokenizer, say, vocabulary)
    begin("evaluation data")
    eval_sets = _eval_sets(config, tokenizer, task, say, vocabulary)
    return JobParts(
        task=task,
        tokenizer=tokenizer,
        policy=policy,
        reference=(reference or policy) if config.use_kl_loss else None,
        teachers=teachers,
        critic=critic if config.trains_critic else None,
        sampling=sampling_parameters(config, task),
        route_shape=route_shape,
        data=task.data if isinstance(task, DatasetTask) else None,
        eval_sets=eval_sets,
    )


def _try_estimator(config: JobConfig) -> None:
    """Call the user's own estimator on two groups of short responses and check what it returns."""
    path = config.advantage_estimator
    if path in ESTIMATORS or config.trains_critic:
        return
    estimator = load_called_with(
        "--advantage-estimator", path, "rewards", "group_index", "loss_masks", "config"
    )
    count = config.n_samples_per_prompt
    groups = torch.arange(2).repeat_interleave(count)
    rewards = torch.arange(2 * count, dtype=torch.float32) % 3
    masks = [torch.tensor([1, 0, 1][: 1 + i % 3]) for i in range(2 * count)]
    what = f"--advantage-estimator {path}"
    result = list(
        try_on_example(
            f"{what} failed on an example of {2 * count} samples",
            estimator,
            rewards,
            groups,
            masks,
            config,
        )
    )
    found = [a.shape if isinstance(a, Tensor) else type(a).__name__ for a in result]
    if found != [mask.shape for mask in masks] or not torch.cat(list(result)).isfinite().all():
        raise HookLoadError(
            f"{what} returned {str(result)[:300]} on an example of "
            f"{2 * count} samples with response lengths {[len(mask) for mask in masks]}; return a "
            "list with one finite tensor [response] per sample"
        )


def _tried_task(
    config: JobConfig, tokenizer: Any, say: Callable[[str], None], vocab_size: int
) -> Task:
    """The task as the driver uses it, tried with one prompt and, where it scores, one reward."""
    task = load_task(config, tokenizer, say)
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
    config: JobConfig, vocab_size: int, say: Callable[[str], None]
) -> tuple[tuple[EvalSet, ...], SamplingParameters]:
    """The sets of --eval-data and how training samples, for an evaluation by itself."""
    task, tokenizer = None, load_tokenizer(config)
    if any(isinstance(rows, int) for _, rows in config.eval_sets):
        task = _tried_task(config, tokenizer, say, vocab_size)
    sets = _eval_sets(config, tokenizer, task, say, vocab_size)
    return sets, sampling_parameters(config, sets[0].task)


def _eval_sets(
    config: JobConfig,
    tokenizer: Any,
    task: Task | None,
    say: Callable[[str], None],
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
            data = _dataset_task(own, tokenizer, say, "--eval-data")
            _try_single_turn(data, config, vocab_size)
            one = EvalSet(name, data, len(data.data))
        if one.rows == 1:
            say(f"--eval-data {name} has one prompt: its scores say little about others")
        found.append(one)
    return tuple(found)


def _require_vocabulary(prompt: Prompt, vocab_size: int) -> None:
    outside = [token for token in prompt.tokens if not 0 <= token < vocab_size]
    if outside:
        raise ConfigError(
            f"prompt 0 holds token {outside[0]}, and the model has {vocab_size}; use the model's "
            "own tokenizer"
        )


def load_task(
    config: JobConfig, tokenizer: Any, say: Callable[[str], None] = print
) -> Task | MultiTurnTask:
    """The task that the configuration names, or the built-in one."""
    if config.task_path is not None:
        return load_own_task(config, tokenizer)
    renders = config.prompt_data is not None and config.apply_chat_template
    if config.chat_template_kwargs is not None and not renders:
        raise ConfigError(
            f"--chat-template-kwargs {config.chat_template_kwargs} would do nothing, because no "
            "chat template is rendered; add --prompt-data with --apply-chat-template, or drop it"
        )
    if config.prompt_data is not None:
        return _dataset_task(config, tokenizer, say)
    if config.hf_checkpoint is not None:
        raise ConfigError(
            f"--hf-checkpoint {config.hf_checkpoint} has nothing to train on; add --prompt-data or "
            "--task-path"
        )
    return CopyDigitsTask(tokenizer, seed=config.seed)


def _dataset_task(
    config: JobConfig, tokenizer: Any, say: Callable[[str], None], option: str = "--prompt-data"
) -> DatasetTask:
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
        say=say,
        option=option,
    )
    limits = enforced_limits(rewards)
    if limits is not None:
        say(limits)
    return DatasetTask(data, tokenizer, rewards)


def _row_problem(
    config: JobConfig, rewards: RewardSet, option: str
) -> Callable[[Mapping[str, Any]], str | None]:
    """What is wrong with a row's label or teacher; evaluation asks no teacher."""
    label_problem = rewards.load().label_problem
    if option != "--prompt-data" or config.teacher_key is None:
        return label_problem
    return lambda row: label_problem(row) or teacher_problem(config, row)


def sampling_parameters(config: JobConfig, task: Task | MultiTurnTask) -> SamplingParameters:
    """How the engines sample; log-probs are turned on with a warning if a feature needs them."""
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
        sampling_mask=config.replays_sampling_mask,
        routed_weights=config.wants_route_weights,
    )


def _other_policy(config: JobConfig, option: str, policy: ModelSource) -> ModelSource | None:
    """The model that `option` names, if it does; it has to have the policy's vocabulary."""
    directory = getattr(config, option.removeprefix("--").replace("-", "_"))
    if directory is None:
        return None
    source = directory_source(directory, option, config)
    theirs, ours = source.hf_config["vocab_size"], policy.hf_config["vocab_size"]
    if theirs != ours:
        raise ConfigError(
            f"{option} {directory} has a vocabulary of {theirs} tokens, the policy of {ours}; "
            "log-probs of the same tokens can be compared only with one tokenizer"
        )
    return source


def check_lengths(config: JobConfig, policy: ModelSource) -> None:
    """Refuse responses and contexts that are longer than the model's positions."""
    longest = policy.hf_config.get("max_position_embeddings")
    for option, length in (
        ("--max-response-length", config.max_response_length),
        ("--eval-max-response-length", config.eval_max_response_length or 0),
    ):
        if longest is not None and length >= longest:
            raise ConfigError(
                f"{option} is {length}, the model has {longest} positions for prompt and response "
                "together; lower it"
            )
    context = config.max_context_length
    if longest is not None and context is not None and context > longest:
        raise ConfigError(
            f"--max-context-length is {context}, the model has {longest} positions; lower it"
        )


def check_memory(config: JobConfig, policy: ModelSource) -> None:
    """Refuse a model whose weights, gradients and optimizer state cannot fit on this machine.

    Of a cluster nothing is known here.
    """
    if policy.directory is None or config.address is not None:
        return
    on_cuda = torch.cuda.is_available()
    described = SimpleNamespace(**policy.hf_config)
    tied = {"lm_head.weight"} if policy.hf_config.get("tie_word_embeddings") else set()
    shapes = {
        name: shape
        for name, shape in HfDirectory(Path(policy.directory)).shapes().items()
        if name not in tied and not is_extra_layer(name, described)
    }
    least = least_bytes(count_weights(shapes), config, on_cuda=on_cuda)
    if on_cuda:
        memory = torch.cuda.get_device_properties(0).total_memory
        refuse_what_cannot_fit(least, memory, "on its GPU")
        return
    ranks = config.ranks_per_node
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
    refuse_what_cannot_fit(least, memory, f"of this machine's memory for each of its {ranks} ranks")


def _check_answer_size(config: JobConfig, policy: ModelSource) -> None:
    """Refuse a bound on servers' answers that the routes of the longest response would pass."""
    if not (config.server_dialect is not None and config.wants_rollout_routes):
        return
    shape = RouteShape.of(policy.hf_config)
    tokens = config.max_context_length or config.max_prompt_length + config.max_response_length
    tokens = min(tokens, int(policy.hf_config.get("max_position_embeddings") or tokens))
    # SGLang sends int32 for every layer, vLLM at least a byte for every MoE layer; both in base64.
    sglang = config.server_dialect == "sglang"
    bytes_per_choice = 4 * (shape.num_layers or 0) if sglang else len(shape.layers)
    needed = tokens * bytes_per_choice * shape.topk * 4 // 3
    if needed > config.max_answer_bytes:
        raise ConfigError(
            f"--max-answer-bytes is {config.max_answer_bytes}, and the routed experts of {tokens} "
            f"tokens alone have {needed}; raise it, or lower --max-response-length"
        )


def _route_shape(config: JobConfig, source: ModelSource) -> tuple[int, int, int] | None:
    """(MoE layers, experts per token, experts); None if dense, which refuses flags about routes."""
    shape = RouteShape.of(source.hf_config)
    if not shape.layers:
        if config.looks_at_routes:
            raise ConfigError(
                f"routing replay or --detect-routing with a {source.hf_config['model_type']} "
                "model, which has no experts; drop the flag or use a MoE model (--embedded-model "
                "qwen3_moe builds a tiny one)"
            )
        return None
    return len(shape.layers), shape.topk, shape.experts
