"""What the value model of a job does with a rollout: values, advantages, its own updates."""

from __future__ import annotations

import time
from typing import Any

import torch

from plugin.batch_types import RolloutBatch
from plugin.cluster.trainer_group import TrainerGroup
from plugin.config import JobConfig
from plugin.environments.trajectory import Rollouts
from plugin.loss.value_loss import explained_variance
from plugin.ppo_utils.advantages import gae_advantages, whiten
from plugin.ragged import Ragged


class CriticSteps:
    """Adds advantages to batches and trains the critic beside the policy."""

    def __init__(self, config: JobConfig, trainer: TrainerGroup) -> None:
        self._config, self._trainer = config, trainer

    def added_to(
        self, batch: RolloutBatch, rollouts: Rollouts
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """The batch with `values`, `returns` and `advantages`, and what is known of them."""
        began = time.monotonic()
        values = self._trainer.values(batch)
        batch = with_gae(self._config, batch, rollouts, values)
        batch.check()
        mask = batch.columns["loss_masks"].values != 0
        said, came = (batch.columns[name].values[mask] for name in ("values", "returns"))
        return batch, {
            "critic/explained_variance": explained_variance(said, came),
            "critic/value": float(said.double().mean()) if len(said) else 0.0,
            "critic/return": float(came.double().mean()) if len(came) else 0.0,
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
