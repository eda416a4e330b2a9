"""Kept ids in a batch: checked, selected, split, joined, padded and moved like every other field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugin.batch_types import Microbatch, RolloutBatch, RolloutSample
from plugin.cluster.array_transport import batch_from_arrays, batch_to_arrays
from plugin.errors import BatchError
from plugin.ragged import Ragged
from plugin.sharding.parallel_context import ParallelContext
from plugin.sharding.sequence_shards import SequenceShards
from plugin.vocabulary_ids import kept_rows

VOCABULARY = 9


def sample_of(rows: list[list[int]], seed: int = 0) -> RolloutSample:
    """A response with these kept ids; the token of a row is its last id, or any where it has none."""
    tokens = [row[-1] if row else seed % VOCABULARY for row in rows]
    return RolloutSample(
        tokens=torch.tensor([1, *tokens]),
        response_length=len(rows),
        loss_mask=torch.ones(len(rows), dtype=torch.int64),
        sampling_mask=Ragged.of([torch.tensor(row, dtype=torch.int32) for row in rows]),
    )


def rows_of(batch: RolloutBatch) -> list[list[list[int]]]:
    """Per sample and response token, its kept ids."""
    rows = kept_rows(batch.columns)
    assert rows is not None
    tokens = iter(rows)
    return [
        [next(tokens).tolist() for _ in range(n)]
        for n in batch.columns["response_lengths"].tolist()
    ]


ROWS = st.lists(st.sets(st.integers(0, VOCABULARY - 1)).map(sorted), min_size=1, max_size=5)


@given(st.lists(ROWS, min_size=1, max_size=5), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_rows_survive_selecting_splitting_joining_and_moving(
    samples: list[list[list[int]]], random: Any
) -> None:
    batch = RolloutBatch.from_samples([sample_of(rows) for rows in samples])
    assert rows_of(batch) == samples
    order = list(range(len(samples)))
    random.shuffle(order)
    assert rows_of(batch.select(order)) == [samples[i] for i in order]
    cut = random.randrange(len(samples) + 1)
    first, second = batch.select(order[:cut]), batch.select(order[cut:])
    assert rows_of(first.concatenated(second)) == [samples[i] for i in order]
    arrays = batch_to_arrays(batch.select(order))
    moved = batch_from_arrays(arrays)
    moved.check(vocabulary=VOCABULARY)
    assert rows_of(moved) == [samples[i] for i in order]
    # Context parallel ranks hold every row once, each with its own ids.
    rows = kept_rows(batch.columns)
    assert rows is not None
    found: dict[int, list[int]] = {}
    for rank in range(2):
        context = ParallelContext(cp_size=2, cp_rank=rank)
        shards = SequenceShards.of(
            batch.columns["total_lengths"],
            batch.columns["response_lengths"],
            torch.device("cpu"),
            context,
        )
        assert shards.in_responses is not None
        places = shards.in_responses.tolist()
        local = shards.local_rows(rows)
        found |= {place: ids.tolist() for place, ids in zip(places, local, strict=True)}
    assert [found[i] for i in range(len(rows))] == [row for s in samples for row in s]


def test_a_padding_microbatch_keeps_the_whole_vocabulary() -> None:
    batch = RolloutBatch.from_samples([sample_of([[1, 2], [3]])])
    padding = Microbatch.padding_like(batch).batch
    padding.check()
    assert padding.columns.keys() == batch.columns.keys()
    assert rows_of(padding) == [[[]]]
    assert padding.columns["rollout_kept_ids"].values.dtype == torch.int32
    assert rows_of(padding.concatenated(batch)) == [[[]], [[1, 2], [3]]]


def test_samples_carry_a_mask_all_or_none() -> None:
    bare = RolloutSample(torch.tensor([1, 2]), 1, torch.ones(1))
    with pytest.raises(BatchError, match="sample 1 has no rollout_kept_counts but others have"):
        RolloutBatch.from_samples([sample_of([[2]]), bare])


def columns_with(**changes: Any) -> RolloutBatch:
    """Two samples; the second keeps [2, 5], all, [0, 4, 8] for its tokens 5, 0, 8."""
    batch = RolloutBatch.from_samples([sample_of([[3]]), sample_of([[2, 5], [], [0, 4, 8]])])
    ids, counts = [[3], [2, 5, 0, 4, 8]], [[1], [2, 0, 3]]
    values = {"rollout_kept_ids": ids, "rollout_kept_counts": counts} | changes
    tensors = {
        name: [torch.tensor(v, dtype=torch.int32) for v in value]
        for name, value in values.items()
        if value is not None
    }
    kept = {"rollout_kept_ids", "rollout_kept_counts"}
    rest = {name: value for name, value in batch.columns.items() if name not in kept}
    return RolloutBatch({**rest, **tensors})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rollout_kept_ids": [[3], [5, 2, 0, 4, 8]]}, "position 0 of sample 7 .* do not ascend"),
        (
            {"rollout_kept_ids": [[3], [2, 5, 4, 4, 8]]},
            "position 2 of sample 7 keeps the id 4 twice",
        ),
        ({"rollout_kept_ids": [[3], [2, 5, -1, 4, 8]]}, "position 2 of sample 7 keeps the id -1"),
        ({"rollout_kept_ids": [[3], [2, 5, 0, 8, 9]]}, "position 2 of sample 7 keeps the id 9"),
        (
            {"rollout_kept_ids": [[3], [2, 5, 0, 4, 6]]},
            "position 2 of sample 7 was sampled as 8, which is not among its 3 kept ids",
        ),
        ({"rollout_kept_counts": [[1], [2, 0]]}, "rollout_kept_counts of sample 7 has length 2"),
        ({"rollout_kept_counts": [[1], [2, 0, 2]]}, "sample 7 has 5 ids .* add up to 4"),
        ({"rollout_kept_counts": [[1], [6, -1, 0]]}, "sample 7 is -1 at position 1"),
        ({"rollout_kept_counts": None}, "has only rollout_kept_ids"),
        ({"rollout_kept_ids": None}, "has only rollout_kept_counts"),
    ],
)
def test_wrong_rows_are_errors_that_name_sample_and_position(
    changes: dict[str, Any], message: str
) -> None:
    columns_with().check(np.array([4, 7]), vocabulary=VOCABULARY)
    with pytest.raises(BatchError, match=message):
        columns_with(**changes).check(np.array([4, 7]), vocabulary=VOCABULARY)


def test_a_masked_token_may_keep_anything() -> None:
    batch = columns_with(rollout_kept_ids=[[3], [2, 5, 99, -1, -1]])
    masks = [torch.ones(1, dtype=torch.int64), torch.tensor([1, 1, 0])]
    batch.with_column("loss_masks", masks).check(vocabulary=VOCABULARY)
