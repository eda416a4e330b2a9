"""Batches and generations survive being flat arrays."""

from __future__ import annotations

import torch

from plugin.batch_types import FIELDS, RolloutBatch, RolloutSample
from plugin.launch.array_transport import (
    batch_from_arrays,
    batch_to_arrays,
    generations_from_arrays,
    generations_to_arrays,
)
from plugin.rollout.engine_protocol import Generation


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


def test_generations_come_back_grouped() -> None:
    def generation(length: int, version: int) -> Generation:
        routes = torch.randint(0, 9, (length + 2, 1, 2), dtype=torch.uint8)
        return Generation(
            torch.arange(length),
            "stop" if length > 1 else "length",
            version,
            torch.rand(length),
            routes,
        )

    answers = [[generation(3, 1), generation(1, 2)], [generation(2, 2)]]
    returned = generations_from_arrays(generations_to_arrays(answers))
    assert [len(answer) for answer in returned] == [2, 1]
    flat = [generation for answer in answers for generation in answer]
    flat_returned = [generation for answer in returned for generation in answer]
    for mine, theirs in zip(flat, flat_returned, strict=True):
        assert torch.equal(mine.tokens, theirs.tokens)
        assert torch.equal(mine.log_probs, theirs.log_probs)
        assert torch.equal(mine.routed_experts, theirs.routed_experts)
        assert (mine.finish_reason, mine.weight_version) == (
            theirs.finish_reason,
            theirs.weight_version,
        )


def test_absent_log_probs_and_routes_stay_absent() -> None:
    bare = [[Generation(torch.arange(2), "stop", 0)]]
    [[returned]] = generations_from_arrays(generations_to_arrays(bare))
    assert returned.log_probs is None and returned.routed_experts is None
