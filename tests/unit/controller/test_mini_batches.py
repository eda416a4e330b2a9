"""Mini-batches: every response once per epoch, in order first, then shuffled by seed; all of it where there is one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugin.batch_types import RolloutBatch, RolloutSample
from plugin.config import JobConfig
from plugin.controller.batch import mini_batches
from plugin.controller.training_loop import learning_rate
from plugin.environments.trajectory import Rollouts
from plugin.errors import ConfigError


def rollouts_of(prompts: int, responses: int, samples: list[int] | None = None) -> Rollouts:
    """A rollout whose samples carry their number as their only prompt token."""
    count = prompts * responses
    per_response = samples or [1] * count
    batch = RolloutBatch.from_samples(
        [
            RolloutSample(torch.tensor([i, 7]), 1, torch.ones(1, dtype=torch.int64))
            for i in range(sum(per_response))
        ]
    )
    return Rollouts(
        batch,
        np.repeat(np.arange(prompts), responses),
        np.array(per_response),
        np.zeros(count),
        np.array([""] * count),
        np.ones(count, np.int64),
        np.zeros(count, np.bool_),
    )


def config_of(prompts: int, responses: int, **settings: Any) -> JobConfig:
    return JobConfig(rollout_batch_size=prompts, n_samples_per_prompt=responses, **settings)


def places(config: JobConfig, rollouts: Rollouts, rollout: int = 0) -> list[list[int]]:
    """The samples of every step, by number."""
    return [
        [int(tokens[0]) for tokens in step.of(rollouts.batch).columns["unconcat_tokens"]]
        for step in mini_batches(config, rollouts, rollout)
    ]


@pytest.mark.parametrize("size", [None, 6])
def test_one_mini_batch_is_the_batch_itself_in_every_epoch(size: int | None) -> None:
    rollouts = rollouts_of(2, 3)
    config = config_of(2, 3, global_batch_size=size, num_updates_per_rollout=2)
    steps = mini_batches(config, rollouts, 0)
    assert [(step.epoch, step.number) for step in steps] == [(0, 0), (1, 0)]
    assert all(step.of(rollouts.batch) is rollouts.batch for step in steps)


def test_the_first_epoch_is_in_order_and_later_ones_are_shuffled_by_seed_and_rollout() -> None:
    rollouts = rollouts_of(4, 2)
    config = config_of(4, 2, global_batch_size=2, num_updates_per_rollout=3)
    first, again = places(config, rollouts), places(config, rollouts)
    assert first == again and first[:4] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert first[4:8] != first[:4] and first[8:] != first[4:8]
    assert sorted(first[4:8]) == first[:4], "mini-batches of whole prompts keep them whole"
    assert places(config, rollouts, rollout=1)[4:] != first[4:]
    other = config_of(4, 2, global_batch_size=2, num_updates_per_rollout=3, seed=5)
    assert places(other, rollouts)[4:] != first[4:]


def test_recorded_routes_keep_the_mini_batches_and_shuffle_their_order() -> None:
    rollouts = rollouts_of(4, 3)
    options = {"global_batch_size": 2, "num_updates_per_rollout": 2}
    steps = places(config_of(4, 3, use_routing_replay=True, **options), rollouts)
    assert steps[:6] != steps[6:] and sorted(steps[6:]) == steps[:6]


@given(
    prompts=st.integers(1, 5),
    responses=st.integers(2, 4),
    epochs=st.integers(1, 3),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_every_epoch_has_every_sample_once_and_responses_stay_whole(
    prompts: int, responses: int, epochs: int, data: st.DataObject
) -> None:
    count = prompts * responses
    sizes = [n for n in range(1, count + 1) if count % n == 0]
    size = data.draw(st.sampled_from(sizes))
    samples = data.draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    rollouts = rollouts_of(prompts, responses, samples)
    config = config_of(prompts, responses, global_batch_size=size, num_updates_per_rollout=epochs)
    steps = places(config, rollouts)
    per_epoch = count // size
    assert len(steps) == config.updates_per_rollout == per_epoch * epochs
    owner = np.repeat(np.arange(count), samples)
    for epoch in range(epochs):
        of_epoch = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(i for step in of_epoch for i in step) == list(range(sum(samples)))
        for step in of_epoch:
            held = set(owner[step])
            assert len(held) == size and len(step) == sum(samples[i] for i in held)


def test_a_rollout_with_fewer_responses_ends_in_a_smaller_mini_batch() -> None:
    config = config_of(4, 2, global_batch_size=4)
    assert places(config, rollouts_of(3, 2)) == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize(
    "size, nearest", [(5, "4 and 6"), (7, "6 and 8"), (23, "12 and 24"), (25, "24")]
)
def test_a_size_that_does_not_divide_the_rollout_is_refused_with_the_nearest(
    size: int, nearest: str
) -> None:
    with pytest.raises(ConfigError, match=f"24 responses .* nearest that fit are {nearest}$"):
        config_of(6, 4, global_batch_size=size)
    with pytest.raises(ConfigError, match="at least 1"):
        config_of(6, 4, global_batch_size=0)


def test_the_learning_rate_decays_over_all_optimizer_steps() -> None:
    config = config_of(
        6,
        4,
        global_batch_size=8,
        num_updates_per_rollout=2,
        num_rollouts=5,
        lr_decay_style="linear",
    )
    # 24 / 8 = 3 mini-batches x 2 epochs x 5 rollouts = 30 steps
    assert (config.updates_per_rollout, config.total_updates) == (6, 30)
    assert learning_rate(config, 15) == pytest.approx(config.lr / 2)
    assert learning_rate(config, 30) == 0
