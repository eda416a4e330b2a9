"""From groups of responses to a checked batch with advantages, and its description."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plugin.batch_types import RolloutBatch, holds_experts, no_route, route_dtype, route_faults
from plugin.config import JobConfig
from plugin.errors import BatchError
from plugin.launch.rollout_queue import Group, samples_of
from plugin.ppo_utils.advantages import estimator_of, whiten


def prepare_batch(config: JobConfig, groups: list[Group], route_shape: Any = None) -> RolloutBatch:
    """The groups' samples as a batch with advantages, or a `BatchError` before any rank sees it.

    route_shape: (moe_layers, topk, experts) that replayed routes must have
    """
    batch = RolloutBatch.from_samples(samples_of(groups))
    config.require_rollout_log_probs("rollout_log_probs" in batch)
    if config.use_rollout_routing_replay:
        batch = with_checked_routes(batch, route_shape)
    counts = [len(t.samples) for group in groups for t in group.trajectories]
    batch = batch.with_column("advantages", advantages_of(config, batch, counts))
    batch.check()
    return batch


def advantages_of(
    config: JobConfig, batch: RolloutBatch, samples_per_trajectory: Sequence[int]
) -> list[Tensor]:
    """One [response] tensor per sample, by the estimator of the configuration.

    A trajectory counts once, however many samples it was split into: it is scored as the one
    sequence of steps that it was, and its advantages are then split over its samples.
    """
    masks = batch.columns["loss_masks"]
    ends = list(itertools.accumulate(samples_per_trajectory))
    parts = [
        masks[end - count : end] for end, count in zip(ends, samples_per_trajectory, strict=True)
    ]
    last = [end - 1 for end in ends]
    whole_masks = [torch.cat(part) for part in parts]
    advantages = estimator_of(config.advantage_estimator)(
        torch.tensor([batch.columns["rewards"][i] for i in last], dtype=torch.float32),
        torch.tensor([batch.columns["group_index"][i] for i in last]),
        whole_masks,
        config,
    )
    if config.normalize_advantages:
        advantages = whiten(advantages, whole_masks)
    return [
        sample
        for whole, part in zip(advantages, parts, strict=True)
        for sample in whole.split([len(mask) for mask in part])
    ]


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
    for i, routes in enumerate(batch.columns["rollout_routed_experts"]):
        if tuple(routes.shape[1:]) != (layers, topk):
            raise BatchError(
                f"rollout_routed_experts of sample {i} has shape {list(routes.shape)}; the model "
                f"has {layers} MoE layers and routes each token to {topk} experts"
            )
        if not holds_experts(routes.dtype, experts):
            raise BatchError(
                f"rollout_routed_experts of sample {i} are {routes.dtype}, which does not hold "
                f"experts 0..{experts - 1}; make the engine report {route_dtype(experts)}"
            )
        outside, repeated = route_faults(routes, experts)
        if bool((outside | repeated).any()):
            raise BatchError(
                f"rollout_routed_experts of sample {i} repeats an expert or names one above "
                f"{experts - 1}; repair the engine's routes (no route is a row of -1 in a signed "
                "type)"
            )
        missing = no_route(routes)
        if bool((missing.any(dim=1) & ~missing.all(dim=1)).any()):
            raise BatchError(
                f"rollout_routed_experts of sample {i} has a token with routes in some MoE layers "
                "only; give all or none"
            )
    return batch.with_column(
        "rollout_routed_experts",
        [routes.to(route_dtype(experts)) for routes in batch.columns["rollout_routed_experts"]],
    )


def describe_batch(batch: RolloutBatch, groups: Sequence[Group], version: int) -> dict[str, float]:
    """What the driver knows about a batch: rewards, lengths, ends, turns and staleness."""
    rewards = torch.tensor([r for group in groups for r in group.rewards], dtype=torch.float64)
    lengths = torch.tensor(batch.columns["response_lengths"], dtype=torch.float64)
    behind = version - torch.tensor(batch.columns["weight_versions"], dtype=torch.float64)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    uniform = sum(max(group.rewards) == min(group.rewards) for group in groups)
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std(correction=0)),
        "uniform_group_share": uniform / len(groups),
        "response_length": float(lengths.mean()),
        "truncated_share": sum(t.truncated for t in trajectories) / len(trajectories),
        "turns": sum(t.turns for t in trajectories) / len(trajectories),
        "samples_per_trajectory": len(batch) / len(trajectories),
        "staleness": float(behind.mean()),
        "staleness_max": float(behind.max()),
    }
