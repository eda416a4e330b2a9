"""From groups to a checked batch with advantages."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from plugin.batch_types import RolloutBatch, RolloutSample, with_checked_routes
from plugin.config import JobConfig
from plugin.controller.batch import (
    advantages_of,
    describe_batch,
    prepare_batch,
)
from plugin.controller.training_loop import learning_rate
from plugin.environments.trajectory import Rollouts, Trajectory
from plugin.errors import BatchError, ConfigError
from plugin.ragged import Ragged


def group(rewards: list[float], **extra: torch.Tensor | None) -> list[Trajectory]:
    """Responses of 2 tokens to a prompt of 3."""
    sample = RolloutSample(
        torch.tensor([1, 2, 3, 4, 5]),
        response_length=2,
        loss_mask=torch.ones(2, dtype=torch.int64),
        rollout_log_probs=extra.get("log_probs", torch.tensor([-0.5, -1.0])),
        routed_experts=extra.get("routes"),
    )
    return [Trajectory((sample,), reward) for reward in rewards]


def batch_of(config: JobConfig, *groups: list[Trajectory]) -> RolloutBatch:
    return prepare_batch(config, Rollouts.of(groups))


def test_grpo_centers_within_the_group() -> None:
    config = JobConfig(grpo_std_normalization=False)
    batch = batch_of(config, group([1.0, 0.0]), group([3.0, 3.0]))
    # Group means 0.5 and 3.
    assert [a.tolist() for a in batch.columns["advantages"]] == [
        [0.5, 0.5],
        [-0.5, -0.5],
        [0.0, 0.0],
        [0.0, 0.0],
    ]


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    # 3 - (0 + 0)/2, 0 - (3 + 0)/2, 0 - (3 + 0)/2
    batch = batch_of(JobConfig(advantage_estimator="rloo"), group([3.0, 0.0, 0.0]))
    assert [float(a[0]) for a in batch.columns["advantages"]] == [3.0, -1.5, -1.5]


def test_gdpo_takes_every_reward_with_the_weight_of_its_flag() -> None:
    config = JobConfig(
        advantage_estimator="gdpo",
        prompt_data="rows.jsonl",
        hf_checkpoint="model",
        reward=("exact", "length_penalty:2"),
    )
    rollouts = Rollouts.of([group([1.0, 200.0, 201.0, 0.0])])
    parts = {
        "length_penalty": np.array([0.0, 100.0, 100.0, 0.0]),
        "exact": np.array([1.0, 0.0, 1.0, 0.0]),
    }
    batch = prepare_batch(config, rollouts, None, parts)
    found = [float(a[1]) for a in batch.columns["advantages"]]
    assert found == pytest.approx([-0.3873, 0.3873, 1.1619, -1.1619], abs=1e-4)
    with pytest.raises(BatchError, match="this rollout has no exact, length_penalty: an env"):
        prepare_batch(config, rollouts)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"reward": ("exact",)}, "gdpo with 1 --reward: it normalizes each of several"),
        (
            {"reward": ("exact", "length_penalty"), "overlong_buffer_length": 2},
            "--overlong-buffer-length is 2 with --advantage-estimator gdpo",
        ),
    ],
)
def test_gdpo_without_several_rewards_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig(
            advantage_estimator="gdpo",
            prompt_data="rows.jsonl",
            hf_checkpoint="model",
            **settings,
        )


@pytest.mark.parametrize(
    "name, reason",
    [
        ("remax", "the reward of a greedy response"),
        ("rae", "environments here have one role"),
        ("optimal_token_baseline", "the sum of squared probabilities"),
    ],
)
def test_estimators_that_need_what_nothing_reports_say_so(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"--advantage-estimator {name}: .*{reason}.*Use "):
        JobConfig(advantage_estimator=name)


@pytest.mark.parametrize(
    "settings",
    [
        {"advantage_estimator": "reinforce_plus_plus"},
        {"advantage_estimator": "reinforce_plus_plus_baseline"},
        {"normalize_advantages": True},
    ],
)
def test_whitened_estimators_have_mean_zero_and_unit_variance(settings: dict[str, object]) -> None:
    rollouts = Rollouts.of([group([1.0, 0.0]), group([0.2, 0.9])])
    flat = advantages_of(JobConfig(**settings), rollouts).values
    assert float(flat.mean()) == pytest.approx(0, abs=1e-6)
    assert float(flat.std()) == pytest.approx(1, abs=1e-4)


def split_in_two(reward: float) -> Trajectory:
    """A trajectory of two samples, each with one sampled token and one of tool output."""
    log_probs = torch.tensor([-0.5, 0.0])
    sample = RolloutSample(
        torch.tensor([1, 4, 5]), 2, torch.tensor([1, 0]), rollout_log_probs=log_probs
    )
    return Trajectory((sample, sample), reward, turns=3)


def test_a_trajectory_of_several_samples_counts_once_in_its_group() -> None:
    mixed = Rollouts.of([[split_in_two(1.0), group([1.0, 0.0])[1]]])
    config = JobConfig(grpo_std_normalization=False)
    batch = prepare_batch(config, mixed)
    # The group's mean is (1 + 0) / 2; counted by samples it would be (1 + 1 + 0) / 3.
    assert [a.tolist() for a in batch.columns["advantages"]] == [[0.5, 0], [0.5, 0], [-0.5, -0.5]]
    described = describe_batch(config, batch, mixed, version=0)
    assert described["samples_per_trajectory"] == 1.5 and described["turns"] == 2.0
    assert described["reward"] == 0.5


def test_a_discounted_return_goes_through_all_samples_of_a_trajectory() -> None:
    config = JobConfig(advantage_estimator="reinforce_plus_plus", gamma=0.5)
    batch = batch_of(config, [split_in_two(1.0)])
    first, second = (float(a[0]) for a in batch.columns["advantages"])
    # Two steps with returns 0.5 and 1: whitened they lie on both sides of their mean.
    assert first == pytest.approx(-second) and second > 0


def test_missing_log_probs_stop_the_batch_before_any_rank_sees_it() -> None:
    silent = group([1.0, 0.0], log_probs=None)
    batch_of(JobConfig(), silent)
    with pytest.raises(ConfigError, match="--use-tis needs rollout_log_probs"):
        batch_of(JobConfig(use_tis=True), silent)


def test_a_log_prob_that_is_not_finite_is_named_with_sample_and_position() -> None:
    broken = group([1.0, 0.0], log_probs=torch.tensor([-0.5, float("nan")]))
    with pytest.raises(BatchError, match="rollout_log_probs of sample 0 is nan at position 1"):
        batch_of(JobConfig(), broken)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (None, "the batch has none"),
        (torch.zeros(5, 1, 2, dtype=torch.uint8), r"name an expert twice: \[0, 0\]"),
        (torch.tensor([[[0, 7]]] * 5), r"are \[0, 7\]; the model has experts 0..3"),
        (torch.tensor([[[0, 1, 2]]] * 5), r"shape \(5, 1, 3\), expected \(5, 1, 2\)"),
        (torch.tensor([[[-1, 1]]] * 5), r"are \[-1, 1\]; the model has experts 0..3"),
        (
            torch.tensor([[[0, 255]]] * 5, dtype=torch.uint8),
            r"are \[0, 255\]; the model has experts 0..3",
        ),
    ],
)
def test_routes_are_checked_on_the_driver(routes: torch.Tensor | None, message: str) -> None:
    batch = batch_of(JobConfig(), group([1.0, 0.0], routes=routes))
    with pytest.raises(BatchError, match=message):
        with_checked_routes(batch, (1, 2, 4))


def test_weights_of_routes_that_are_to_be_replayed_have_to_be_there() -> None:
    routes = torch.tensor([[[0, 1]]] * 5, dtype=torch.int8)
    config = JobConfig(embedded_model="qwen3_moe", use_rollout_routing_replay="ids+weights")
    with pytest.raises(BatchError, match=r"ids\+weights needs rollout_routed_weights"):
        prepare_batch(config, Rollouts.of([group([1.0, 0.0], routes=routes)]), (1, 2, 4))


def test_a_token_without_a_route_passes_in_all_layers_or_none() -> None:
    routes = torch.tensor([[[0, 1], [2, 3]]] * 5, dtype=torch.int8)
    routes[1] = -1
    with_checked_routes(batch_of(JobConfig(), group([1.0, 0.0], routes=routes)), (2, 2, 4))
    routes[3, 0] = -1
    with pytest.raises(
        BatchError, match="token 3 of sample 0 has routes in some layers only; give all or none"
    ):
        with_checked_routes(batch_of(JobConfig(), group([1.0, 0.0], routes=routes)), (2, 2, 4))


def test_learning_rate_warms_up_then_decays() -> None:
    linear = JobConfig(
        lr=1.0, min_lr=0.2, lr_warmup_steps=2, lr_decay_style="linear", num_rollouts=6
    )
    # Warm-up 1/2, 1; then 1 to 0.2 over the other four updates, a quarter of 0.8 at a time.
    rates = [learning_rate(linear, update) for update in range(6)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4])
    cosine = JobConfig(lr=1.0, lr_decay_style="cosine", num_rollouts=2)
    assert learning_rate(cosine, 1) == pytest.approx(0.5)


def test_preparing_100_000_samples_takes_less_than_a_second_of_cpu() -> None:
    """Advantages, checks, description; a loop over the samples would take many."""
    count, length = 100_000, 8
    tokens = torch.arange(count * length) % 15
    batch = RolloutBatch(
        {
            "unconcat_tokens": Ragged(tokens, [length] * count),
            "total_lengths": torch.full((count,), length),
            "response_lengths": torch.full((count,), length // 2),
            "loss_masks": Ragged(torch.ones(count * length // 2).long(), [length // 2] * count),
            "rollout_log_probs": Ragged(-torch.rand(count * length // 2), [length // 2] * count),
            "weight_versions": torch.zeros(count, dtype=torch.int64),
        }
    )
    rollouts = Rollouts(
        batch,
        np.repeat(np.arange(count // 8), 8),
        np.ones(count, np.int64),
        np.arange(count) % 3 / 2.0,
        np.full(count, ""),
        np.ones(count, np.int64),
        np.zeros(count, np.bool_),
    )
    config = JobConfig()
    began = time.process_time()
    prepared = prepare_batch(config, rollouts)
    describe_batch(config, prepared, rollouts, 0)
    assert time.process_time() - began < 1.0
    assert len(prepared.columns["advantages"]) == count
