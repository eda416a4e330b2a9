"""Batches and generations survive being flat arrays."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from plugin.batch_types import FIELDS, RolloutBatch, RolloutSample
from plugin.cluster.array_transport import (
    batch_from_arrays,
    batch_to_arrays,
    from_arrays,
    to_arrays,
)
from plugin.environments.trajectory import Rollouts, Trajectory, failed
from plugin.ragged import Ragged


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
            routed_weights=torch.rand(total, 3, 2) + 0.1,
            # Of the last token, which is total - 1; the others were drawn from everything.
            sampling_mask=Ragged(torch.arange(total).int(), [0] * (response - 1) + [total]),
        )
        for number, (total, response) in enumerate([(5, 3), (4, 1)])
    ]
    batch = RolloutBatch.from_samples(samples)
    for name, field in FIELDS.items():
        if name not in batch and field.shape == "response":
            batch = batch.with_column(name, [-torch.rand(3), -torch.rand(1)])
    ids, log_probs = torch.tensor([[1, 2]] * 4, dtype=torch.int32), torch.full((4, 2), -1.0)
    batch = batch.with_column("teacher_topk_ids", [ids[:3], ids[3:]])
    batch = batch.with_column("teacher_topk_log_probs", [log_probs[:3], log_probs[3:]])
    return batch.with_column("rollout_mask_sums", [3.0, 1.0])


def test_every_field_of_the_table_comes_back_as_it_was() -> None:
    batch = full_batch()
    assert batch.columns.keys() == FIELDS.keys()
    returned = batch_from_arrays(batch_to_arrays(batch))
    returned.check()
    assert returned.columns.keys() == batch.columns.keys()
    for name, values in batch.columns.items():
        for mine, theirs in zip(values, returned.columns[name], strict=True):
            assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype


def sample(
    prompt: int, length: int, version: int | torch.Tensor, mask: torch.Tensor
) -> RolloutSample:
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


def there_and_back(answers: list[list[Trajectory]]) -> tuple[Rollouts, Rollouts]:
    sent = Rollouts.of(answers)
    return sent, from_arrays(Rollouts, to_arrays(sent))


def test_rollouts_come_back_grouped() -> None:
    mask, ones = torch.tensor([1, 0, 1]), torch.ones(3, dtype=torch.int64)
    several = Trajectory((sample(2, 3, 1, mask), sample(1, 1, 2, ones[:1])), 0.5, None, 4, True)
    one = Trajectory((sample(2, 2, 2, ones[:2]),))
    sent, returned = there_and_back([[several, failed("the tool broke")], [one]])
    assert returned.groups.tolist() == [0, 0, 1] and returned.samples.tolist() == [2, 0, 1]
    assert returned.rewards[0] == 0.5 and np.isnan(returned.rewards[1:]).all()
    assert returned.errors.tolist() == ["", "the tool broke", ""]
    assert returned.turns.tolist() == [4, 1, 1] and returned.truncated.tolist() == [
        True,
        False,
        False,
    ]
    assert returned.oldest_version[[0, 2]].tolist() == [1, 2]
    assert returned.response(2) == one.samples[0].tokens[-2:].tolist()
    for name, values in sent.batch.columns.items():
        for mine, theirs in zip(values, returned.batch.columns[name], strict=True):
            assert torch.equal(mine, theirs), name


def test_versions_travel_in_stretches_and_masked_tokens_have_none() -> None:
    ones = torch.ones(100, dtype=torch.int64)
    interrupted = torch.arange(100) // 50 + 4
    tool = ones.clone()
    tool[:60] = 0
    answers = [
        [Trajectory((sample(2, 100, interrupted, ones),))],
        [Trajectory((sample(2, 100, interrupted, tool),))],
        [Trajectory((sample(2, 100, 5, 0 * ones),))],
    ]
    sent, returned = there_and_back(answers)
    # 4 x 50, 5 x 50, 4 x 50, 5 x 150
    stretches = to_arrays(sent)["weight_versions"]
    assert stretches.tolist() == [[4, 5, 4, 5], [50, 50, 50, 150]]
    for mine, theirs in zip(
        *(side.batch.columns["weight_versions"] for side in (sent, returned)), strict=True
    ):
        assert torch.equal(mine, theirs)
    assert returned.oldest_version.tolist() == [4, 5, np.iinfo(np.int64).max]


@given(st.lists(st.lists(st.integers(-1, 3), min_size=1, max_size=6), max_size=6))
def test_any_versions_survive_the_way(rows: list[list[int]]) -> None:
    answers = [
        [Trajectory((sample(1, len(row), torch.tensor(row), torch.ones(len(row))),))]
        for row in rows
    ]
    _, returned = there_and_back(answers)
    assert [row.tolist() for row in returned.batch.columns["weight_versions"]] == rows
    assert returned.oldest_version.tolist() == list(map(min, rows))


def test_selected_and_joined_rollouts_keep_their_samples() -> None:
    ones = torch.ones(3, dtype=torch.int64)
    answers = [
        [Trajectory((sample(2, 3, 1, ones), sample(1, 1, 2, ones[:1])), 0.5)],
        [Trajectory((sample(2, 2, version, ones[:2]),), float(version)) for version in (3, 4)],
    ]
    rollouts = Rollouts.of(answers)
    both = Rollouts.concatenated([rollouts, rollouts])
    picked = both.select(np.array([5, 0]), np.array([0, 1]))
    assert picked.rewards.tolist() == [4.0, 0.5] and picked.samples.tolist() == [1, 2]
    versions = picked.batch.columns["weight_versions"]
    assert [row.tolist() for row in versions] == [[4, 4], [1, 1, 1], [2]]
    assert picked.groups.tolist() == [0, 1]


def test_absent_log_probs_and_routes_stay_absent() -> None:
    _, returned = there_and_back(
        [[Trajectory((RolloutSample(torch.arange(3), 2, torch.ones(2)),))]]
    )
    assert "rollout_log_probs" not in returned.batch
    assert "rollout_routed_experts" not in returned.batch


def test_an_answer_of_failures_only_comes_back() -> None:
    _, returned = there_and_back([[failed("a"), failed("b")]])
    assert returned.errors.tolist() == ["a", "b"] and len(returned.batch) == 0
