"""What can be found wrong before an actor starts: hooks, estimator, engine, task, models."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plugin.cluster.model_source import ModelSource, directory_source, policy_source
from plugin.cluster.placement import check_machine
from plugin.cluster.ray_cluster import check_address
from plugin.config import JobConfig
from plugin.config.flags import expect
from plugin.config.import_paths import load_called_with, try_on_example
from plugin.config.loss.loss_config import ESTIMATOR_TRAITS
from plugin.controller.preflight.advice import Machine, advice
from plugin.controller.preflight.resource_checks import check_memory, check_open_files
from plugin.controller.preflight.task_checks import (
    checked_eval_sets,
    checked_task,
    checked_teachers,
)
from plugin.engines.choice import (
    check_engine,
    check_engine_model,
    check_engine_size,
    sampling_parameters,
)
from plugin.engines.expert_routes import RouteShape
from plugin.engines.protocol import SamplingParameters
from plugin.errors import ConfigError, HookLoadError
from plugin.loss.objective import check_loss
from plugin.loss.partial_objective import takes_separable_head
from plugin.observe.detectors import load_detectors
from plugin.tasks.loading import load_tokenizer
from plugin.tasks.prompt_data import DatasetTask, PromptDataset
from plugin.tasks.protocol import EvalSet, Task


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
    log: Callable[[str], None] = print,
    begin: Callable[[str], None] = lambda _: None,
) -> JobParts:
    """Load and try what the configuration names; raise on the first thing that cannot work.

    log: prints a message; begin: is told the name of each check before it runs
    """
    begin("machine" if config.address is None else "cluster address")
    if config.address is None:
        check_machine(config, cores=os.cpu_count() or 1, gpus=torch.cuda.device_count())
    else:
        check_address(config.address)
    check_open_files(config)
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
    check_engine_model(config, policy.hf_config)
    check_engine_size(config, policy.hf_config)
    check_lengths(config, policy)
    check_patience(config)
    room = check_memory(config, policy)
    for line in advice(config, policy, None if room is None else Machine.here(room)):
        log(line)
    _check_answer_size(config, policy)
    reference = _other_policy(config, "--ref-hf-checkpoint", policy)
    critic = _other_policy(config, "--critic-hf-checkpoint", policy) or policy
    route_shape = _route_shape(config, policy)
    if config.replays_route_weights and config.router_gradient == "stop":
        log(
            "--use-rollout-routing-replay ids+weights: the routers get no gradient and stay as "
            "they are; --router-gradient keep trains them"
        )
    vocabulary = policy.hf_config["vocab_size"]
    tokenizer = load_tokenizer(config)
    if config.teacher_specs:
        begin("teachers")
    teachers = checked_teachers(config, policy, tokenizer, log)
    begin("task and reward")
    task = checked_task(config, tokenizer, log, vocabulary)
    begin("evaluation data")
    eval_sets = checked_eval_sets(config, tokenizer, task, log, vocabulary)
    return JobParts(
        task=task,
        tokenizer=tokenizer,
        policy=policy,
        reference=(reference or policy) if config.use_kl_loss else None,
        teachers=teachers,
        critic=critic if config.trains_critic else None,
        sampling=sampling_parameters(config, task.stop_token_ids),
        route_shape=route_shape,
        data=task.data if isinstance(task, DatasetTask) else None,
        eval_sets=eval_sets,
    )


def _try_estimator(config: JobConfig) -> None:
    """Call the user's own estimator on two groups of short responses and check what it returns."""
    path = config.advantage_estimator
    if path in ESTIMATOR_TRAITS:
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


def check_patience(config: JobConfig) -> None:
    """Refuse deadlines of servers that a response of the greatest length would miss."""
    if config.server_dialect is None:
        return
    needed, given = config.longest_response_seconds, config.rollout_request_timeout
    expect(
        given is None or given >= needed,
        f"--rollout-request-timeout {given}: a response of --max-response-length "
        f"{config.max_response_length} at --least-response-speed {config.least_response_speed:g} "
        f"takes {needed:g} s; raise the timeout or the speed, or drop the timeout",
    )


def _check_answer_size(config: JobConfig, policy: ModelSource) -> None:
    """Refuse a bound on servers' answers that the routes of the longest response would pass."""
    if not (config.server_dialect is not None and config.wants_rollout_routes):
        return
    shape = RouteShape.of(policy.hf_config)
    tokens = config.longest_sample
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
