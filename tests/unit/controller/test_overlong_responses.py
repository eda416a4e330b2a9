"""Masking of truncated responses and the soft overlong penalty, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plugin.batch_types import RolloutBatch, RolloutSample
from plugin.config import JobConfig
from plugin.controller.batch import describe_batch, prepare_batch
from plugin.environments.trajectory import Rollouts, Trajectory


def response(length: int, reward: float, *, cut: bool = False) -> Trajectory:
    sample = RolloutSample(
        torch.arange(2 + length),
        response_length=length,
        loss_mask=torch.ones(length, dtype=torch.int64),
        rollout_log_probs=torch.full((length,), -0.5),
    )
    return Trajectory((sample,), reward, truncated=cut)


def prepared(
    answers: list[list[Trajectory]], **flags: Any
) -> tuple[RolloutBatch, dict[str, float]]:
    config = JobConfig(grpo_std_normalization=False, **flags)
    rollouts = Rollouts.of(answers)
    batch = prepare_batch(config, rollouts)
    return batch, describe_batch(config, batch, rollouts, 0)


def first_advantages(batch: RolloutBatch) -> list[float]:
    return [float(advantages[0]) for advantages in batch.columns["advantages"]]


def test_a_truncated_response_is_masked_and_still_counts_in_the_baseline() -> None:
    answers = [[response(2, 1.0), response(3, 0.0, cut=True), response(2, 0.5)]]
    batch, described = prepared(answers, overlong_filtering=True)
    assert [mask.tolist() for mask in batch.columns["loss_masks"]] == [[1, 1], [0, 0, 0], [1, 1]]
    # Mean of all three rewards: 0.5.
    assert first_advantages(batch) == [0.5, 0.0, 0.0]
    assert described["truncated_share"] == pytest.approx(1 / 3)
    unfiltered, _ = prepared(answers)
    assert first_advantages(unfiltered) == [0.5, -0.5, 0.0]


def test_the_soft_penalty_is_linear_in_the_last_tokens() -> None:
    # Limit 10, buffer 4: no penalty up to 6 tokens, then 1/4 per token, times 2.
    answers = [[response(length, 1.0) for length in (1, 6, 7, 8, 10)]]
    batch, described = prepared(
        answers, max_response_length=10, overlong_buffer_length=4, overlong_penalty_factor=2.0
    )
    assert batch.columns["rewards"].tolist() == [1.0, 1.0, 0.5, 0.0, -1.0]
    # Mean 0.3.
    assert first_advantages(batch) == pytest.approx([0.7, 0.7, 0.2, -0.3, -1.3])
    # (0 + 0 - 0.5 - 1 - 2) / 5; the reward stays the task's.
    assert described["overlong_penalty"] == pytest.approx(-0.7) and described["reward"] == 1.0


def test_without_the_flag_there_is_no_penalty_and_no_metric_of_it() -> None:
    batch, described = prepared([[response(10, 1.0)]], max_response_length=10)
    assert batch.columns["rewards"].tolist() == [1.0] and "overlong_penalty" not in described
