"""From groups of responses to a checked batch with advantages, and its description."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from plugin.batch_types import RolloutBatch, check_routes, route_dtype
from plugin.config import JobConfig
from plugin.controller.batch.overlong_responses import overlong_penalty, with_overlong_rules
from plugin.environments.trajectory import Rollouts
from plugin.errors import BatchError
from plugin.ppo_utils.advantages import ESTIMATORS, estimator_of, whiten
from plugin.ragged import Ragged
from plugin.sampling_mask import KEPT_COUNTS


def prepare_batch(config: JobConfig, rollouts: Rollouts, route_shape: Any = None) -> RolloutBatch:
    """The samples as a batch with advantages, or a `BatchError` before any rank sees it.

    Advantages of a value model come later: it has to see the batch first.

    route_shape: (moe_layers, topk, experts) that replayed routes must have
    """
    rollouts = with_overlong_rules(config, rollouts)
    batch = rollouts.batch.with_column(
        "rewards", np.repeat(rollouts.rewards, rollouts.samples)
    ).with_column("group_index", np.repeat(rollouts.groups, rollouts.samples))
    config.require_rollout_log_probs("rollout_log_probs" in batch)
    if config.use_rollout_routing_replay:
        batch = with_checked_routes(batch, route_shape)
    if config.replays_route_weights and "rollout_routed_weights" not in batch:
        raise BatchError(
            "--use-rollout-routing-replay ids+weights needs rollout_routed_weights and the batch "
            "has none; use an engine that reports them, or ids"
        )
    if not config.trains_critic:
        batch = batch.with_column("advantages", advantages_of(config, rollouts))
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


def advantages_of(config: JobConfig, rollouts: Rollouts) -> Ragged:
    """One [response] tensor per sample, by the estimator of the configuration.

    A trajectory counts once, however many samples it was split into: it is scored as the one
    sequence of steps that it was, and its advantages are then split over its samples.
    """
    masks: Ragged = rollouts.batch.columns["loss_masks"]
    ends = np.cumsum([0, *masks.lengths])[np.append(rollouts.sample_starts, len(masks))]
    whole_masks = Ragged(masks.values, np.diff(ends))
    advantages = estimator_of(config.advantage_estimator)(
        torch.from_numpy(rollouts.rewards).float(),
        torch.from_numpy(rollouts.groups),
        # The user's own estimator is promised a list of tensors.
        whole_masks if config.advantage_estimator in ESTIMATORS else list(whole_masks),
        config,
    )
    if config.normalize_advantages:
        advantages = whiten(advantages, whole_masks)
    return masks.like(Ragged.of(advantages).values)


def with_checked_routes(batch: RolloutBatch, shape: tuple[int, int, int]) -> RolloutBatch:
    """The batch with its routes in the one type of the model.

    Every token has distinct experts in range in every MoE layer, or no route at all.
    """
    if "rollout_routed_experts" not in batch:
        raise BatchError(
            "--use-rollout-routing-replay needs rollout_routed_experts and the batch has none; "
            "use an engine that reports them, or --use-routing-replay"
        )
    layers, topk, experts = shape
    routes: Ragged = batch.columns["rollout_routed_experts"]
    totals = batch.columns["total_lengths"]
    check_routes(routes, layers=layers, topk=topk, experts=experts, total_lengths=totals)
    one_type = routes.like(routes.values.to(route_dtype(experts)))
    return batch.with_column("rollout_routed_experts", one_type)


def describe_batch(
    config: JobConfig, batch: RolloutBatch, rollouts: Rollouts, version: int
) -> dict[str, float]:
    """What the driver knows about a batch: rewards, lengths, ends, turns and staleness.

    The reward is the task's, without the overlong penalty.
    """
    rewards = rollouts.rewards
    oldest, newest = rollouts.oldest_version, rollouts.newest_version
    behind = version - rollouts.token_versions[0]
    starts = np.flatnonzero(np.diff(rollouts.groups, prepend=-1))
    uniform = np.maximum.reduceat(rewards, starts) == np.minimum.reduceat(rewards, starts)
    penalty = overlong_penalty(config, rollouts)
    counts = batch.columns.get(KEPT_COUNTS)
    kept = {} if counts is None else {"kept_ids_per_token": float(counts.values.double().mean())}
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
