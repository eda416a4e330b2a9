"""What is computed on a rollout before its updates: log-probs, teachers' scores, values.

What the ranks compute stays with them. The driver reads values, of which it makes advantages, and
tokens where a teacher is behind HTTP. The value model's own updates are here, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plugin.batch_types import RolloutBatch
from plugin.cluster.array_transport import only
from plugin.cluster.trainer_actor import teacher_policy
from plugin.cluster.trainer_group import TrainerGroup
from plugin.config import JobConfig
from plugin.controller.batch import MiniBatch, few_samples, first_epoch
from plugin.controller.preflight.job_checks import JobParts
from plugin.environments.trajectory import Rollouts
from plugin.loss.hook_chain import batch_declarations
from plugin.loss.policy_losses import explained_variance
from plugin.ppo_utils.advantages import gae_advantages, whiten
from plugin.ppo_utils.importance_ratio import k1, k3
from plugin.ragged import Integers, Ragged, TokenColumn, concatenated
from plugin.tasks.prompt_format import lookup
from plugin.teachers.http_teacher import HttpTeacher

#: An approximation is checked by a pass on its second rollout, as the first also warms up, and
#: then on every 50th.
_FIRST_CHECK, _CHECK_EVERY = 2, 50


class LogProbPasses:
    """Adds what the loss needs from forward-only passes.

    The trainer's own log-probs are computed where they can differ from those of the update: with
    more than one update on a rollout, or when its routes are replayed, and where a correction has
    to know them of the whole batch first. Otherwise, on an only update, they are the update's own.
    """

    def __init__(
        self,
        config: JobConfig,
        parts: JobParts,
        trainer: TrainerGroup,
        teachers: Teachers | None = None,
    ) -> None:
        self._config, self._parts, self._trainer = config, parts, trainer
        self._teachers = teachers
        self._whole_batch_first = bool(batch_declarations(config))
        self._approximated = 0
        self._seconds_per_token: float | None = None

    def added_to(
        self,
        batch: RolloutBatch,
        updates: list[MiniBatch],
        prompts: Sequence[int] = (),
        sampled: SampledVersions | None = None,
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """The batch with log-probs of the policies that were asked, and seconds as metrics.

        prompts: the numbers of the groups' prompts
        sampled: the weight versions of the tokens (--train-log-probs engine-version)
        """
        began = time.monotonic()
        saved: dict[str, float] = {}
        if self._config.train_log_probs == "approximate" and len(updates) > 1:
            batch, saved = self._checked(batch)
        elif sampled is not None and sampled.are_stale:
            column, lost = _of_sampled_versions(self._trainer, batch, sampled)
            batch = batch.with_column("proximal_log_probs", column)
            saved["lost_version_share"] = lost
            if self._whole_batch_first:  # some look at the policy before the update, too
                batch = batch.with_column("log_probs", self._trainer.log_probs("policy", batch))
        elif len(updates) > 1 or self._config.use_routing_replay or self._whole_batch_first:
            batch = batch.with_column("log_probs", self._train_log_probs(batch, updates))
        if self._parts.reference is not None:
            batch = batch.with_column("ref_log_probs", self._trainer.log_probs("reference", batch))
        if self._teachers is not None:
            batch = self._teachers.added_to(batch, updates, prompts)
        return batch, {"seconds_log_probs": time.monotonic() - began, **saved}

    def _train_log_probs(self, batch: RolloutBatch, updates: list[MiniBatch]) -> TokenColumn:
        if not self._config.use_routing_replay:
            return self._trainer.log_probs("policy", batch)
        # Recorded routes belong to one cut of one batch. The first epoch is in order.
        parts = [update.of(batch) for update in updates if update.epoch == 0]
        return concatenated(
            [
                self._trainer.log_probs("policy", part, keep_routes=number > 0)
                for number, part in enumerate(parts)
            ]
        )

    def _checked(self, batch: RolloutBatch) -> tuple[RolloutBatch, dict[str, float]]:
        """Seconds saved by the skipped pass, estimated from one that is run now and then.

        The batch carries what that one found for metrics alone: it trains on the approximation, so
        that a resumed run trains as one that was never interrupted.
        """
        self._approximated += 1
        tokens = int(batch.columns["total_lengths"].sum())
        if self._approximated % _CHECK_EVERY == _FIRST_CHECK:
            began = time.monotonic()
            batch = batch.with_column("log_probs", self._trainer.log_probs("policy", batch))
            self._seconds_per_token = (time.monotonic() - began) / tokens
            return batch, {}
        if self._seconds_per_token is None:
            return batch, {}
        return batch, {"seconds_log_probs_saved": self._seconds_per_token * tokens}


@dataclass(frozen=True)
class SampledVersions:
    """Which weights sampled a batch.

    tokens: [N] of each sample with loss, by weight version; current: the trainer's version
    """

    tokens: Mapping[int, Integers]
    current: int

    @classmethod
    def of(cls, batch: RolloutBatch, current: int) -> SampledVersions:
        """Of a batch whose versions and masks are in this process."""
        masks, versions = batch.columns["loss_masks"], batch.columns["weight_versions"]
        counts = masks.values.numpy() != 0
        found, samples = versions.values.numpy()[counts], masks.sample_index[counts]
        return cls(
            {
                version: np.bincount(samples[found == version], minlength=len(batch))
                for version in np.unique(found).tolist()
            },
            current,
        )

    @property
    def are_stale(self) -> bool:
        return any(version != self.current for version in self.tokens)


def _of_sampled_versions(
    trainer: TrainerGroup, batch: RolloutBatch, sampled: SampledVersions
) -> tuple[TokenColumn, float]:
    """The column `proximal_log_probs`, and the share of tokens whose version is not kept.

    Every sample is scored once by each of its versions, and its tokens take the log-probs of
    theirs. Tokens of a version that is not kept take those of the current weights, as with
    recompute.
    """
    names = sampled.tokens.keys() - {sampled.current}
    kept = [version for version in trainer.kept_versions() if version in names]
    total = sum(sampled.tokens.values(), np.zeros(len(batch), np.int64))
    older = sum((sampled.tokens[version] for version in kept), np.zeros_like(total))
    # The current weights first, on every token of a sample; what is older then takes its places.
    scored: dict[int | None, Any] = {None: (older < total) | (total == 0)}
    scored |= {version: sampled.tokens[version] > 0 for version in kept}
    column: TokenColumn | None = None
    place = np.full(len(batch), -1)
    for version, samples in scored.items():
        for chosen in (samples & (place < 0), samples & (place >= 0)):
            numbers = np.flatnonzero(chosen)
            if not len(numbers):
                continue
            part = batch.select(numbers)
            if column is not None and place[numbers[0]] >= 0:
                part = part.with_column("proximal_log_probs", column.select(place[numbers]))
            found = trainer.version_log_probs(part, version)
            place[numbers] = (0 if column is None else len(column)) + np.arange(len(numbers))
            column = found if column is None else concatenated([column, found])
    assert column is not None
    lost = total - older - sampled.tokens.get(sampled.current, 0)
    return column.select(place), float(lost.sum()) / max(1, int(total.sum()))


class UpdateKl:
    """How far the updates on a rollout move the policy, at some of its tokens.

    The policy before them is computed when this is made.
    """

    def __init__(self, trainer: TrainerGroup, batch: RolloutBatch) -> None:
        self._trainer, self._batch = trainer, few_samples(batch)
        self._before = trainer.log_probs("policy", self._batch)

    def metrics(self) -> dict[str, float]:
        """After the updates: KLs between the policies before, after and of the rollout."""
        after = self._trainer.log_probs("policy", self._batch)
        read = only(self._batch, "loss_masks")
        kept = read.columns["loss_masks"].values != 0

        def values(column: TokenColumn) -> Tensor:
            found = only(self._batch.with_column("log_probs", column), "log_probs")
            return found.columns["log_probs"].values[kept].double()

        def mean(numbers: Tensor) -> float:
            return float(numbers.mean()) if len(numbers) else 0.0

        old, new = values(self._before), values(after)
        metrics = {
            "update_kl/k1": mean(k1(old - new)),
            "update_kl/k3": mean(k3(old - new)),
            "update_kl/abs": mean((old - new).abs()),
        }
        if "rollout_log_probs" in self._batch:
            rollout = only(self._batch, "rollout_log_probs").columns["rollout_log_probs"]
            sampled = rollout.values[kept].double()
            metrics["update_kl/mismatch_before"] = mean(k3(sampled - old))
            metrics["update_kl/mismatch_after"] = mean(k3(sampled - new))
        return metrics


#: The columns that a teacher fills in for a batch.
Teacher = Callable[[RolloutBatch], Mapping[str, TokenColumn]]


class Teachers:
    """All teachers of a job.

    name_of: the teacher of a prompt, by its number; None where there is only one
    """

    def __init__(
        self, teachers: Mapping[str, Teacher], name_of: Callable[[int], str] | None = None
    ) -> None:
        self._teachers, self._name_of = teachers, name_of

    @classmethod
    def of(cls, config: JobConfig, parts: JobParts, trainer: TrainerGroup) -> Teachers:
        """Those that the configuration names; the ranks have built the ones in the job."""
        found: dict[str, Teacher] = {}
        for spec in config.teacher_specs:
            if spec.urls:
                vocabulary = parts.policy.hf_config["vocab_size"]
                teacher = HttpTeacher(config, spec, vocabulary, trainer.while_idle)
                found[spec.name] = partial(_stored_scores, teacher.score, trainer)
            else:
                found[spec.name] = partial(trainer.scores, teacher_policy(spec.name))
        key, data = config.teacher_key, parts.data
        if key is None or data is None:
            return cls(found)
        return cls(found, lambda number: lookup(data.row(number), key))

    def added_to(
        self, batch: RolloutBatch, updates: Sequence[MiniBatch], prompts: Sequence[int]
    ) -> RolloutBatch:
        """The batch with the columns of the teachers.

        prompts: the numbers of the groups' prompts. Every mini-batch of the first epoch is scored
        by itself, as it is trained on: a teacher with the weights of the policy then differs from
        it in nothing.
        """
        parts = [self._scores(update.of(batch), prompts) for update in updates if not update.epoch]
        for name in parts[0]:
            batch = batch.with_column(name, concatenated([part[name] for part in parts]))
        batch.check()
        return batch

    def _scores(self, batch: RolloutBatch, prompts: Sequence[int]) -> Mapping[str, TokenColumn]:
        name_of = self._name_of
        if name_of is None:
            [teacher] = self._teachers.values()
            return teacher(batch)
        groups: Tensor = batch.columns["group_index"]
        by_group = {number: name_of(prompts[number]) for number in set(groups.tolist())}
        names = np.array([by_group[number] for number in groups.tolist()])
        order, parts = [], []
        for name, teacher in self._teachers.items():
            own = np.flatnonzero(names == name)
            if len(own):
                order.append(own)
                parts.append(teacher(batch.select(own)))
        back = np.argsort(np.concatenate(order))
        return {
            column: concatenated([part[column] for part in parts]).select(back)
            for column in parts[0]
        }


def _stored_scores(
    score: Callable[[RolloutBatch], dict[str, Ragged]], trainer: TrainerGroup, batch: RolloutBatch
) -> Mapping[str, TokenColumn]:
    """The columns of a teacher that the driver asks, checked and in the object store."""
    scored = only(batch, "unconcat_tokens", "loss_masks")
    columns = score(scored)
    for name, values in columns.items():
        scored = scored.with_column(name, values)
    scored.check()
    stored = trainer.stored(scored.without_column("unconcat_tokens").without_column("loss_masks"))
    return {name: stored.columns[name] for name in columns}


class CriticSteps:
    """Adds advantages to batches and trains the critic beside the policy."""

    def __init__(self, config: JobConfig, trainer: TrainerGroup) -> None:
        self._config, self._trainer = config, trainer

    def added_to(
        self, batch: RolloutBatch, rollouts: Rollouts, updates: Sequence[MiniBatch] = ()
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """The batch with `values`, `returns` and `advantages`, and what is known of them.

        updates: by which the new columns are stored
        """
        began = time.monotonic()
        batch = batch.with_column("values", self._trainer.values(batch))
        read = only(batch, "loss_masks", "values")
        read = with_gae(self._config, read, rollouts, read.columns["values"])
        for name in ("returns", "advantages"):
            batch = batch.with_column(name, read.columns[name])
        kept = read.columns["loss_masks"].values != 0
        values, returns = (read.columns[name].values[kept] for name in ("values", "returns"))
        return self._trainer.stored(batch, first_epoch(updates)), {
            "critic/explained_variance": explained_variance(values, returns),
            "critic/value": float(values.double().mean()) if len(values) else 0.0,
            "critic/return": float(returns.double().mean()) if len(returns) else 0.0,
            "seconds_values": time.monotonic() - began,
        }

    def train(self, batch: RolloutBatch, update: int) -> dict[str, Any]:
        """One optimizer step of the critic on a mini-batch; `update` counts from 0."""
        began, rate = time.monotonic(), self._config.critic_learning_rate(update)
        trained = self._trainer.train_critic(batch, rate)
        return trained.metrics | {
            "critic/lr": rate,
            "critic/skipped": float(trained.skipped is not None),
            "seconds_critic": time.monotonic() - began,
        }


def with_gae(
    config: JobConfig, batch: RolloutBatch, rollouts: Rollouts, values: Ragged
) -> RolloutBatch:
    """The batch with `values`, `returns` and `advantages`, each [response] per sample.

    A trajectory is one sequence of steps, however many samples it was split into.
    """
    masks: Ragged = batch.columns["loss_masks"]
    whole_masks = rollouts.per_trajectory(masks)
    advantages, returns = gae_advantages(
        torch.from_numpy(rollouts.rewards).float(),
        rollouts.per_trajectory(values),
        whole_masks,
        gamma=config.gamma,
        lambd=config.lambd,
    )
    if config.normalize_advantages:
        advantages = whiten(advantages, whole_masks)
    for name, column in (("values", values), ("returns", returns), ("advantages", advantages)):
        batch = batch.with_column(name, masks.like(column.values))
    return batch
