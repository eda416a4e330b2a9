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
from plugin.rollout.conversation.trajectory import Segment, Trajectory, failed
from plugin.rollout.engines.protocol import Generation


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


def generation(length: int, version: int) -> Generation:
    routes = torch.randint(0, 9, (length + 2, 1, 2), dtype=torch.uint8)
    reason = "stop" if length > 1 else "length"
    return Generation(torch.arange(length), reason, version, torch.rand(length), routes)


def test_trajectories_come_back_grouped() -> None:
    mask = torch.tensor([1, 0, 1])
    several = Trajectory(
        (Segment((1, 2), generation(3, 1), mask), Segment((1,), generation(1, 2))), 0.5, None, 4
    )
    one = Trajectory((Segment((7, 8), generation(2, 2)),))
    answers = [[several, failed("the tool broke")], [one]]
    returned = trajectories_from_arrays(trajectories_to_arrays(answers))
    assert [len(answer) for answer in returned] == [2, 1]
    [[first, second], [third]] = returned
    assert (first.reward, first.error, first.turns) == (0.5, None, 4)
    assert second == failed("the tool broke")
    assert third.reward is None and third.turns == 1
    for mine, theirs in zip(
        several.segments + one.segments, first.segments + third.segments, strict=True
    ):
        assert mine.prompt == theirs.prompt
        assert (mine.loss_mask is None) == (theirs.loss_mask is None)
        a, b = mine.generation, theirs.generation
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.log_probs, b.log_probs)
        assert torch.equal(a.routed_experts, b.routed_experts)
        assert (a.finish_reason, a.weight_version) == (b.finish_reason, b.weight_version)
    assert torch.equal(first.segments[0].loss_mask, mask)


def test_absent_log_probs_and_routes_stay_absent() -> None:
    bare = Trajectory((Segment((1,), Generation(torch.arange(2), "stop", 0)),))
    [[returned]] = trajectories_from_arrays(trajectories_to_arrays([[bare]]))
    [segment] = returned.segments
    assert segment.generation.log_probs is None and segment.generation.routed_experts is None


def test_an_answer_of_failures_only_comes_back() -> None:
    assert trajectories_from_arrays(trajectories_to_arrays([[failed("a"), failed("b")]])) == [
        [failed("a"), failed("b")]
    ]
