"""How an engine's actor turns requests into trajectories: by the kind of the task."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from plugin.config import JobConfig
from plugin.launch.model_source import load_tokenizer
from plugin.launch.preflight import load_task
from plugin.rollout.conversation.environment_protocol import MultiTurnTask
from plugin.rollout.conversation.multi_turn import run_multi_turn
from plugin.rollout.conversation.single_turn import run_single_turn
from plugin.rollout.conversation.trajectory import Trajectory
from plugin.rollout.engines.protocol import GenerationRequest, RolloutEngine, SamplingParameters

Rollouts = Callable[
    [RolloutEngine, Sequence[GenerationRequest], SamplingParameters], list[list[Trajectory]]
]


def choose_rollouts(config: JobConfig) -> Rollouts:
    """`run_multi_turn` with what it needs if the task has several turns, otherwise `run_single_turn`.

    Only a task of the user's own can have several; its code is loaded here, in the process that plays it.
    """
    if config.task_path is None:
        return run_single_turn
    tokenizer = load_tokenizer(config)
    task = load_task(config, tokenizer)
    if not isinstance(task, MultiTurnTask):
        return run_single_turn
    return functools.partial(run_multi_turn, task=task, tokenizer=tokenizer, config=config)
