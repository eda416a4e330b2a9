"""Batches and generations survive being flat arrays."""

from __future__ import annotations

import torch

from plugin.batch_types import FIELDS, RolloutBatch, RolloutSample
from plugin.launch.array_transport import (
    batch_from_arrays,
    batch_to_arrays,
    trajectories_from_arrays,
    trajectories_to_arrays,
)
from plugin.rollout.conversation.trajectory import Trajectory, failed


def full_batch() -> RolloutBatch:
    """Two samples of different length with every field of the table."""
    samples = [
        RolloutSample(
            tokens=torch.arange(total),
            response_length=response,
            loss_mask=torch.ones(response, dtype=torch.int64),
            reward=0.25 * total,
            group_index=number,
            weight_version=7,
            rollout_log_probs=-torch.rand(response),
            routed_experts=torch.randint(0, 4, (total, 3, 2), dtype=torch.uint8),
        )
        for number, (total, response) in enumerate([(5, 3), (4, 1)])
    ]
    batch = RolloutBatch.from_samples(samples)
    for name, field in FIELDS.items():
        if name not in batch and field.shape == "response":
            batch = batch.with_column(name, [-torch.rand(3), -torch.rand(1)])
    return batch.with_column("rollout_mask_sums", [3.0, 1.0])


def test_every_field_of_the_table_comes_back_as_it_was() -> None:
    batch = full_batch()
    assert batch.columns.keys() == FIELDS.keys()
    returned = batch_from_arrays(batch_to_arrays(batch))
    returned.check()
    assert returned.columns.keys() == batch.columns.keys()
    for name, values in batch.columns.items():
        for mine, theirs in zip(values, returned.columns[name], strict=True):
            if FIELDS[name].shape == "scalar":
                assert mine == theirs and type(mine) is type(theirs)
            else:
                assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype


def sample(prompt: int, length: int, version: int, mask: torch.Tensor) -> RolloutSample:
    routes = torch.randint(0, 9, (prompt + length, 1, 2), dtype=torch.uint8)
    log_probs = -torch.rand(length)
    tokens = torch.arange(prompt + length)
    return RolloutSample(
        tokens,
        length,
        mask,
        weight_version=version,
        rollout_log_probs=log_probs,
        routed_experts=routes,
    )


def test_trajectories_come_back_grouped() -> None:
    mask, ones = torch.tensor([1, 0, 1]), torch.ones(3, dtype=torch.int64)
    several = Trajectory((sample(2, 3, 1, mask), sample(1, 1, 2, ones[:1])), 0.5, None, 4, True)
    one = Trajectory((sample(2, 2, 2, ones[:2]),))
    answers = [[several, failed("the tool broke")], [one]]
    returned = trajectories_from_arrays(trajectories_to_arrays(answers))
    assert [len(answer) for answer in returned] == [2, 1]
    [[first, second], [third]] = returned
    assert (first.reward, first.error, first.turns, first.truncated) == (0.5, None, 4, True)
    assert second == failed("the tool broke")
    assert third.reward is None and third.turns == 1 and not third.truncated
    for mine, theirs in zip(
        several.samples + one.samples, first.samples + third.samples, strict=True
    ):
        assert torch.equal(mine.tokens, theirs.tokens)
        assert torch.equal(mine.loss_mask, theirs.loss_mask)
        assert torch.equal(mine.rollout_log_probs, theirs.rollout_log_probs)
        assert torch.equal(mine.routed_experts, theirs.routed_experts)
        assert mine.response_length == theirs.response_length
        assert mine.weight_version == theirs.weight_version


def test_absent_log_probs_and_routes_stay_absent() -> None:
    bare = Trajectory((RolloutSample(torch.arange(3), 2, torch.ones(2)),))
    [[returned]] = trajectories_from_arrays(trajectories_to_arrays([[bare]]))
    [only] = returned.samples
    assert only.rollout_log_probs is None and only.routed_experts is None


def test_an_answer_of_failures_only_comes_back() -> None:
    assert trajectories_from_arrays(trajectories_to_arrays([[failed("a"), failed("b")]])) == [
        [failed("a"), failed("b")]
    ]
