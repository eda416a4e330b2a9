"""Evaluation: prompts that are never trained on, on the job's engines, between two rollouts.

Every evaluation of a set creates its own queue, so that prompts and seeds are the same each time
and nothing of it enters a training batch or the counts of training prompts. The engines first
finish the training groups they have and get no new ones until the evaluation ends: it sees one
version of the weights, and no training group goes stale during it.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from plugin.config import JobConfig
from plugin.controller.queue.rollout_queue import Engines, QueueCounts, RolloutQueue
from plugin.engines.protocol import SamplingParameters
from plugin.errors import BatchError, EngineError
from plugin.observe.evaluation_metrics import evaluation_metrics
from plugin.rewards.scorers import Scorer
from plugin.tasks.protocol import EvalSet, Task

_ATTEMPTS = 3


def evaluation_sampling(config: JobConfig, sampling: SamplingParameters) -> SamplingParameters:
    """How the engines sample in an evaluation; they report nothing but the tokens.

    sampling: that of training
    """
    temperature = config.eval_temperature
    if temperature is None:
        one = config.n_samples_per_eval_prompt == 1
        temperature = 0.0 if one else config.rollout_temperature
    greedy = temperature == 0
    return SamplingParameters(
        temperature=1.0 if greedy else temperature,
        top_p=1.0 if greedy else config.eval_top_p,
        top_k=1 if greedy else None,
        max_response_length=config.eval_max_response_length or sampling.max_response_length,
        stop_token_ids=sampling.stop_token_ids,
        log_probs=False,
    )


class Evaluations:
    """When a run evaluates, the results, and which checkpoint is the best.

    records: the evaluations that the run directory already has; new ones are added to the list
    """

    def __init__(
        self, config: JobConfig, evaluator: Evaluator, records: list[dict[str, Any]]
    ) -> None:
        self._config, self._evaluator, self.records = config, evaluator, records

    def is_due(self, rollouts: int) -> bool:
        """Whether the weights after `rollouts` rollouts should be evaluated and have not been."""
        config = self._config
        if any(record.get("rollout") == rollouts for record in self.records):
            return False
        if rollouts == 0:
            return config.eval_at_start
        at_interval = config.eval_interval is not None and rollouts % config.eval_interval == 0
        return at_interval or rollouts == config.num_rollouts

    def run(self, step: int, rollouts: int, version: int) -> dict[str, Any]:
        """Evaluate the weights after `rollouts` rollouts; returns what metrics.jsonl gets."""
        position = {"step": step, "rollout": rollouts, "weight_version": version}
        self.records.append({**position, **self._evaluator.run(version)})
        return self.records[-1]

    def go_back(self, rollouts: int) -> None:
        """Drop evaluations after rollout `rollouts`, which the run is going to repeat."""
        self.records[:] = [r for r in self.records if r.get("rollout", 0) <= rollouts]

    def last_is_best(self, best_step: int | None) -> bool:
        """Whether no evaluation is better than the last on the first set.

        best_step: of the checkpoint that is the best one so far
        """
        name = f"eval/{self._config.eval_sets[0][0]}/mean"
        before = [r.get(name, -math.inf) for r in self.records if r["step"] == best_step]
        return self.records[-1][name] > max(before, default=-math.inf)


class Evaluator:
    """Evaluates whatever weights the engines have on every set.

    sampling: that of training; log: prints a message for a person
    scorer_of: who computes the rewards of a set's task; none = the task, on this thread
    """

    def __init__(
        self,
        config: JobConfig,
        sets: Sequence[EvalSet],
        engines: Engines,
        sampling: SamplingParameters,
        log: Callable[[str], None],
        scorer_of: Callable[[Task], Scorer | None] = lambda _: None,
    ) -> None:
        self._config, self._sets, self._engines, self._log = config, sets, engines, log
        self._scorer_of = scorer_of
        self._sampling = evaluation_sampling(config, sampling)

    def run(self, version: int) -> dict[str, float]:
        """`eval/<set>/<metric>` of every set; the engines must have, or be sent, `version`."""
        metrics: dict[str, float] = {}
        began = time.monotonic()
        for evaluated in self._sets:
            values = self._evaluate(evaluated, version)
            metrics |= {f"eval/{evaluated.name}/{name}": value for name, value in values.items()}
        return {**metrics, "seconds_evaluating": time.monotonic() - began}

    def _evaluate(self, evaluated: EvalSet, version: int) -> dict[str, float]:
        config = self._config
        queue = RolloutQueue(
            evaluated.task,
            self._engines,
            self._sampling,
            _queue_config(config, evaluated),
            lambda text: self._log(f"evaluation on {evaluated.name}: {text}"),
            self._scorer_of(evaluated.task),
            counts=QueueCounts(issued=evaluated.first),
        )
        groups = queue.take_all(evaluated.rows)
        foreign = {group.weight_version for group in groups} - {version}
        if foreign:
            raise EngineError(
                f"an engine answered with weights of version {min(foreign)} while version "
                f"{version} was evaluated; it does not load new weights"
            )
        if not groups:
            raise BatchError(
                f"evaluation on {evaluated.name}: none of its {evaluated.rows} prompts could be "
                "generated and scored; the messages above say why"
            )
        metrics = evaluation_metrics(
            [group.rewards for group in groups],
            pass_at=config.pass_at,
            pass_reward=config.eval_pass_reward,
        )
        lengths = []
        for group in groups:
            rollouts = group.rollouts
            tokens = rollouts.batch.columns["response_lengths"].numpy()
            owner = np.repeat(np.arange(len(rollouts)), rollouts.samples)
            lengths.append(np.bincount(owner, tokens, len(rollouts))[group.place])
        return metrics | {
            "prompts": float(len(groups)),
            "failed_prompts": float(queue.counts.dropped_failed),
            "response_length": float(np.concatenate(lengths).mean()),
            "truncated_share": float(np.concatenate([group.truncated for group in groups]).mean()),
        }


def _queue_config(config: JobConfig, evaluated: EvalSet) -> JobConfig:
    """The settings that a queue reads, for an evaluation."""
    attempts = config.max_error_reschedule_attempts
    return config.unchecked_copy(
        rollout_batch_size=evaluated.rows,
        n_samples_per_prompt=config.n_samples_per_eval_prompt,
        seed=zlib.crc32(f"{config.seed}/{evaluated.name}".encode()),
        async_rollouts=False,
        dynamic_sampling=False,
        over_sampling_batch_size=None,
        # A greedy response that fails, fails again.
        max_error_reschedule_attempts=_ATTEMPTS if attempts is None else attempts,
    )


def describe(metrics: Mapping[str, float]) -> str:
    """An evaluation in one line: every mean and pass@k with its interval."""
    parts = []
    for key, value in metrics.items():
        name = key.removeprefix("eval/")
        if key.startswith("eval/") and name.rpartition("/")[2].startswith(("mean", "pass@")):
            low, high = metrics.get(f"{key}/ci_low"), metrics.get(f"{key}/ci_high")
            bounds = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
            parts.append(f"{name} {value:.3f}{bounds}")
    return ", ".join(parts)
