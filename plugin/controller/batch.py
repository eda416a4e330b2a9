"""From groups of responses to checked batches with advantages, their description and their parts.

Long responses are treated as in DAPO: those cut off may be masked, those close to the limit
penalized. A mini-batch is `--global-batch-size` responses. The first epoch takes them in the order
of the rollout; every later one is a new permutation by seed: of whole prompts where mini-batches
hold whole prompts, otherwise of responses. Advantages are known before, so a group may be split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from plugin.batch_types import RolloutBatch, with_checked_routes
from plugin.config import JobConfig
from plugin.config.loss.loss_config import estimator_traits
from plugin.environments.trajectory import Rollouts
from plugin.errors import BatchError
from plugin.ppo_utils.advantages import (
    ESTIMATORS,
    estimator_of,
    gdpo_advantages,
    spread_over_tokens,
    whiten,
)
from plugin.ragged import Integers, Ragged, ragged_range

#: [M] of every reward before its weight, by name.
RewardParts = Mapping[str, NDArray[np.float64]]


def prepare_batch(
    config: JobConfig,
    rollouts: Rollouts,
    route_shape: Any = None,
    parts: RewardParts | None = None,
) -> RolloutBatch:
    """The samples as a batch with advantages, or a `BatchError` before any rank sees it.

    Advantages of a value model come later: it has to see the batch first.

    route_shape: (moe_layers, topk, experts) that replayed routes must have
    parts: every reward before its weight, by name
    """
    rollouts = with_overlong_rules(config, rollouts)
    batch = rollouts.batch.with_column(
        "rewards", np.repeat(rollouts.rewards, rollouts.samples)
    ).with_column("group_index", np.repeat(rollouts.groups, rollouts.samples))
    config.require_rollout_log_probs("rollout_log_probs" in batch)
    config.require_head(batch.columns)
    if config.use_rollout_routing_replay:
        batch = with_checked_routes(batch, route_shape)
    if config.replays_route_weights and "rollout_routed_weights" not in batch:
        raise BatchError(
            "--use-rollout-routing-replay ids+weights needs rollout_routed_weights and the batch "
            "has none; use an engine that reports them, or ids"
        )
    if not config.trains_critic:
        batch = batch.with_column("advantages", advantages_of(config, rollouts, parts))
    batch.check()
    return batch


def without_old_tokens(rollouts: Rollouts, oldest: int) -> tuple[Rollouts, float]:
    """The rollouts with tokens of versions before `oldest` masked, and their share of all.

    They stay in the sequence as context; advantages and denominators are of the others.
    """
    masks: Ragged = rollouts.batch.columns["loss_masks"]
    old = (masks.values != 0) & (rollouts.batch.columns["weight_versions"].values < oldest)
    share = float(old.sum()) / max(1, int((masks.values != 0).sum()))
    kept = masks.like(masks.values.masked_fill(old, 0))
    return replace(rollouts, batch=rollouts.batch.with_column("loss_masks", kept)), share


def advantages_of(
    config: JobConfig, rollouts: Rollouts, parts: RewardParts | None = None
) -> Ragged:
    """One [response] tensor per sample, by the estimator of the configuration.

    A trajectory counts once, however many samples it was split into: it is scored as the one
    sequence of steps that it was, and its advantages are then split over its samples.
    """
    masks: Ragged = rollouts.batch.columns["loss_masks"]
    whole_masks = rollouts.per_trajectory(masks)
    groups = torch.from_numpy(rollouts.groups)
    advantages: Sequence[torch.Tensor]
    if estimator_traits(config.advantage_estimator).parts:
        per_sample = gdpo_advantages(
            _rewards_by_part(config, parts or {}),
            groups,
            [spec.weight for spec in config.reward_specs],
            std_normalization=config.grpo_std_normalization,
        )
        advantages = spread_over_tokens(per_sample, whole_masks)
    else:
        advantages = estimator_of(config.advantage_estimator)(
            torch.from_numpy(rollouts.rewards).float(),
            groups,
            # The user's own estimator is promised a list of int64 tensors.
            whole_masks
            if config.advantage_estimator in ESTIMATORS
            else list(whole_masks.like(whole_masks.values.long())),
            config,
        )
    if config.normalize_advantages:
        advantages = whiten(advantages, whole_masks)
    return masks.like(Ragged.of(advantages).values)


def _rewards_by_part(config: JobConfig, parts: RewardParts) -> torch.Tensor:
    """[M, K] float32 in the order of --reward."""
    missing = [spec.name for spec in config.reward_specs if spec.name not in parts]
    if missing:
        raise BatchError(
            f"--advantage-estimator {config.advantage_estimator} needs every reward of each "
            f"response and this rollout has no {', '.join(missing)}: an environment or a task gave "
            "one number; let --reward score the responses, or use grpo"
        )
    columns = [torch.from_numpy(parts[spec.name]) for spec in config.reward_specs]
    return torch.stack(columns, dim=1).float()


def describe_batch(
    config: JobConfig, batch: RolloutBatch, rollouts: Rollouts, version: int
) -> dict[str, float]:
    """What the driver knows about a batch: rewards, lengths, ends, turns and staleness.

    The reward is the task's, without the overlong penalty.
    """
    rewards = rollouts.rewards
    oldest, newest = rollouts.oldest_version, rollouts.newest_version
    behind = version - rollouts.token_versions()
    starts = np.flatnonzero(np.diff(rollouts.groups, prepend=-1))
    uniform = np.maximum.reduceat(rewards, starts) == np.minimum.reduceat(rewards, starts)
    penalty = overlong_penalty(config, rollouts)
    sums, tokens = batch.columns.get("kept_sums"), int(batch.columns["response_lengths"].sum())
    kept = {} if sums is None else {"kept_ids_per_token": int(sums.sum()) / max(1, tokens)}
    return {
        **kept,
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "uniform_group_share": float(uniform.mean()),
        "response_length": float(batch.columns["response_lengths"].double().mean()),
        "truncated_share": float(rollouts.truncated.mean()),
        "turns": float(rollouts.turns.mean()),
        "samples_per_trajectory": len(batch) / len(rollouts),
        "staleness": float(behind.mean()) if len(behind) else 0.0,
        "staleness_max": float(behind.max(initial=0)),
        "interrupted_share": float((oldest < newest).mean()),
        **({} if penalty is None else {"overlong_penalty": float(penalty.mean())}),
    }


def with_overlong_rules(config: JobConfig, rollouts: Rollouts) -> Rollouts:
    """The rollouts as they are trained on: penalized rewards, and masks of 0 where cut off."""
    penalty = overlong_penalty(config, rollouts)
    if penalty is not None:
        rollouts = replace(rollouts, rewards=rollouts.rewards + penalty)
    if config.overlong_filtering and bool(rollouts.truncated.any()):
        masks: Ragged = rollouts.batch.columns["loss_masks"]
        cut = torch.from_numpy(np.repeat(rollouts.truncated, rollouts.samples)[masks.sample_index])
        masks = masks.like(torch.where(cut, 0, masks.values))
        rollouts = replace(rollouts, batch=rollouts.batch.with_column("loss_masks", masks))
    return rollouts


def overlong_penalty(config: JobConfig, rollouts: Rollouts) -> NDArray[np.float64] | None:
    """[M] what each response's reward loses for its length, at most 0; None without the penalty.

    0 up to `max_response_length - overlong_buffer_length` tokens, then linear down to
    `-overlong_penalty_factor` at `max_response_length`. For responses of one turn, which are one
    sample each.
    """
    buffer = config.overlong_buffer_length
    if buffer is None:
        return None
    lengths = rollouts.batch.columns["response_lengths"].double().numpy()
    beyond = lengths - (config.max_response_length - buffer)
    return -config.overlong_penalty_factor * np.clip(beyond / buffer, 0.0, 1.0)


@dataclass(frozen=True)
class MiniBatch:
    """The samples of one optimizer step.

    epoch, number: which pass over the rollout, and which step of that pass, from 0
    samples: [n] their places in the rollout's batch, ascending; None = all
    """

    epoch: int
    number: int
    samples: Integers | None = None

    def of(self, batch: RolloutBatch) -> RolloutBatch:
        """The part of the rollout's batch; the batch itself where that is all of it."""
        return batch if self.samples is None else batch.select(self.samples)


def first_epoch(updates: Sequence[MiniBatch]) -> list[Integers | None]:
    """The samples of every mini-batch of the first epoch."""
    return [update.samples for update in updates if update.epoch == 0]


def mini_batches(config: JobConfig, rollouts: Rollouts, rollout: int) -> list[MiniBatch]:
    """The optimizer steps on a rollout, in order; `rollout`: its number in the run.

    The last mini-batch of an epoch is smaller where the rollout holds fewer responses than planned.
    """
    size = config.global_batch_size or len(rollouts)
    steps = []
    for epoch in range(config.num_updates_per_rollout):
        if size >= len(rollouts):
            steps.append(MiniBatch(epoch, 0))
            continue
        for number, part in enumerate(_responses(config, rollouts, rollout, epoch, size)):
            part.sort()
            samples = ragged_range(rollouts.sample_starts[part], rollouts.samples[part])
            steps.append(MiniBatch(epoch, number, samples))
    return steps


def _responses(
    config: JobConfig, rollouts: Rollouts, rollout: int, epoch: int, size: int
) -> list[Integers]:
    """The responses of each mini-batch of an epoch."""
    everything = np.arange(len(rollouts))
    cuts = range(size, len(rollouts), size)
    in_order = np.split(everything, cuts)
    if epoch == 0:
        return in_order
    generator = np.random.default_rng([config.seed, rollout, epoch])
    if config.use_routing_replay:
        # Routes are recorded for these very mini-batches: only their order changes.
        return [in_order[i] for i in generator.permutation(len(in_order))]
    unit = rollouts.groups if size % config.n_samples_per_prompt == 0 else everything
    order = np.argsort(generator.permutation(unit.max() + 1)[unit], kind="stable")
    return np.split(order, cuts)
