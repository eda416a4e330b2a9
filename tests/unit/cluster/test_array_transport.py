"""Batches and generations survive being flat arrays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plugin.batch_types import FIELDS, Microbatch, RolloutBatch, RolloutSample, SamplerHead
from plugin.cluster.array_transport import (
    BULK,
    apart,
    batch_from_arrays,
    batch_to_arrays,
    fetched,
    from_arrays,
    only,
    rejoined,
    store,
    to_arrays,
)
from plugin.cluster.engine_actor import EngineActor
from plugin.environments.trajectory import Rollouts, Trajectory, failed
from plugin.errors import BatchError, BatchLost
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
            head=SamplerHead(
                torch.tensor([[3, 1, -1]] * response).int(), torch.full((response, 3), -1.5)
            ),
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
    batch = batch.with_column("rollout_mask_sums", [3.0, 1.0])
    return batch.with_column("loss_token_counts", [3, 1])


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
    assert returned.response(2).tolist() == one.samples[0].tokens[-2:].tolist()
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


@pytest.mark.parametrize("distinct", [3, 400])
def test_advantages_travel_in_stretches_where_these_are_smaller(distinct: int) -> None:
    values = (torch.arange(400) % distinct).sort().values / 3 - 1
    batch = RolloutBatch(
        {
            "total_lengths": [301, 101],
            "response_lengths": [300, 100],
            "advantages": [values[:300], values[300:]],
        }
    )
    arrays = batch_to_arrays(batch)
    # 3 stretches of two float64 numbers; 400 different ones stay 400 float32 numbers.
    assert arrays["advantages"].nbytes == (48 if distinct == 3 else 1600)
    arrived = batch_from_arrays(arrays).columns["advantages"].values
    assert torch.equal(arrived, values) and arrived.dtype == torch.float32


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


def routed_answer(first: int) -> Rollouts:
    """Two groups of three trajectories, one of them failed and one of two samples."""

    def one(number: int) -> RolloutSample:
        total = 3 + number % 4
        return RolloutSample(
            tokens=torch.full((total,), number),
            response_length=2,
            loss_mask=torch.ones(2, dtype=torch.int64),
            rollout_log_probs=torch.full((2,), -0.5),
            routed_experts=torch.full((total, 6, 1), number, dtype=torch.int8)
            + torch.arange(6, dtype=torch.int8)[:, None],
            sampling_mask=Ragged(torch.tensor([number, number, 99]), [1, 2]),
            head=SamplerHead(
                torch.tensor([[number, -1], [99, number]]).int(), torch.full((2, 2), -1.0)
            ),
        )

    samples = iter(range(first, first + 7))
    sizes = [[1, 1, 2], [1, 0, 1]]
    return Rollouts.of(
        [
            [
                Trajectory(tuple(one(next(samples)) for _ in range(n))) if n else failed("no")
                for n in group
            ]
            for group in sizes
        ]
    )


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_bulk_columns_stay_apart_and_whoever_selects_samples_fetches_these_alone(
    parts: int,
) -> None:
    store: dict[str, Any] = {}
    answers, whole = [], []
    for number, first in enumerate((0, 20)):
        rollouts = routed_answer(first)
        head, bulk = apart(rollouts, parts)
        assert not set(BULK) & head.keys() and len(bulk) == parts
        names = [f"{number}/{part}" for part in range(parts)]
        store |= dict(zip(names, bulk, strict=True))
        answers.append(rejoined(head, names))
        whole.append(rollouts)
    batch, expected = (one[0].batch.concatenated(one[1].batch) for one in (answers, whole))
    batch.check()
    assert batch.stored.keys() == {"rollout_routed_experts", *BULK[2:]}
    order = [9, 2, 3, 0]
    chosen, asked = batch.select(order), []

    def get(names: list[Any]) -> list[Any]:
        asked.append(names)
        return [store[name] for name in names]

    arrived = fetched(chosen, layers=[1, 2], get=get)
    arrived.check()
    assert len(asked) == 1, "columns of the same objects are fetched together"
    if parts == 3:  # an object per trajectory: 9 and 0, and both samples of one
        assert sorted(asked[0]) == ["0/0", "0/2", "1/2"]
    want = expected.select(order).columns
    for name in BULK[2:]:
        assert torch.equal(arrived.columns[name].values, want[name].values)
    routes = want["rollout_routed_experts"]
    mine = arrived.columns["rollout_routed_experts"]
    assert torch.equal(mine.values, routes.values[:, 1:3])
    assert mine.lengths.tolist() == routes.lengths.tolist()
    apart_layers = fetched(chosen, layers=[0, 5], get=get).columns["rollout_routed_experts"]
    assert torch.equal(apart_layers.values, routes.values[:, [0, 5]])


def test_a_share_without_samples_knows_the_shape_of_routes_that_are_elsewhere() -> None:
    head, bulk = apart(routed_answer(0), 1)
    batch = rejoined(head, bulk).batch.select(np.zeros(0, np.int64))
    arrived = fetched(batch, layers=[3], get=list)
    routes = arrived.columns["rollout_routed_experts"].values
    assert routes.shape == (0, 1, 1) and routes.dtype == torch.int8
    assert Microbatch.padding_like(arrived).batch.columns["rollout_routed_experts"].values.shape == (2, 1, 1)  # fmt: skip


def test_values_that_are_elsewhere_are_not_mistaken_for_values() -> None:
    head, bulk = apart(routed_answer(0), 1)
    batch = rejoined(head, bulk).batch
    with pytest.raises(TypeError, match="not in this process; fetch"):
        list(batch.columns["rollout_routed_experts"])
    moved = batch_from_arrays(batch_to_arrays(batch))
    assert moved.stored.keys() == batch.stored.keys()


def test_an_engine_refuses_wrong_routes_before_they_are_stored_and_stores_the_models_type() -> None:
    def answer(experts: list[int]) -> Trajectory:
        routes = torch.tensor(experts)[:, None, None]
        mask = torch.ones(1, dtype=torch.int64)
        return Trajectory((RolloutSample(torch.tensor([5, 6]), 1, mask, routed_experts=routes),))

    actor: Any = object.__new__(EngineActor)
    actor._replays, actor._route_shape, actor._parts = True, (1, 1, 4), 2
    actor._server = SimpleNamespace(collect=lambda era: [(17, [answer([0, 3]), answer([1, 2])])])
    _, parts = actor.collect(0)
    kept = [part["rollout_routed_experts"] for part in parts]
    assert [(routes.dtype, routes.ravel().tolist()) for routes in kept] == [
        (np.int8, [0, 3]),
        (np.int8, [1, 2]),
    ]
    actor._server = SimpleNamespace(collect=lambda era: [(17, [answer([0, 3]), answer([1, 4])])])
    with pytest.raises(BatchError, match=r"prompts 17: routes of sample 1, token 1, MoE layer 0"):
        actor.collect(0)


def test_a_stored_batch_is_fetched_sample_by_sample_as_it_was() -> None:
    batch, objects = full_batch().without_column("loss_token_counts"), []

    def put(arrays: Any) -> int:
        objects.append(arrays)
        return len(objects) - 1

    stored = store(batch, [np.array([1]), np.array([0])], put)
    assert stored.columns["loss_token_counts"].tolist() == [3, 1]
    assert objects[0]["unconcat_tokens"].dtype == np.int32
    assert objects[1]["loss_masks"].dtype == np.uint8
    for chosen in ([0, 1], [1, 0], [1], [0, 0, 1]):
        arrived = fetched(stored.select(chosen), get=lambda ids: [objects[i] for i in ids])
        arrived.check()
        for name, values in batch.select(chosen).columns.items():
            for mine, theirs in zip(values, arrived.columns[name], strict=True):
                assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype, name
    # Again: nothing is here any more but numbers.
    assert store(stored, [np.array([0, 1])], put) is stored and len(objects) == 2


def test_neighbors_in_one_object_are_a_view_of_it_and_values_that_do_not_fit_stay_wide() -> None:
    batch, objects = full_batch(), []

    def get(references: list[Any]) -> list[Any]:
        return [objects[i] for i in references]

    stored = store(batch, [np.array([0, 1])], lambda arrays: objects.append(arrays) or 0)  # type: ignore[func-returns-value]
    for chosen in ([0, 1], [1]):
        log_probs = fetched(stored.select(chosen), get=get).columns["log_probs"].values
        assert np.shares_memory(log_probs.numpy(), objects[0]["log_probs"])
    tokens = batch.columns["unconcat_tokens"]
    wrong = batch.with_column("unconcat_tokens", tokens.like(tokens.values - 2**40))
    objects.clear()
    stored = store(wrong, [np.array([0, 1])], lambda arrays: objects.append(arrays) or 0)  # type: ignore[func-returns-value]
    assert objects[0]["unconcat_tokens"].dtype == np.int64
    with pytest.raises(BatchError, match=f"unconcat_tokens of sample 0 is {-(2**40)} at position"):
        fetched(stored, get=get).check()


def test_a_part_of_the_batch_that_is_lost_with_its_node_is_known_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    def lose(references: list[Any]) -> list[Any]:
        raise ray.exceptions.ObjectLostError("ff", None, "")

    monkeypatch.setattr(ray, "get", lose)
    stored = store(full_batch(), [np.array([0, 1])], lambda arrays: 0)
    with pytest.raises(BatchLost, match="a part of the batch is lost with the node it was on"):
        only(stored, "log_probs")


def test_an_answers_head_has_small_tokens_and_masks() -> None:
    head, _ = apart(routed_answer(0), 1)
    assert head["unconcat_tokens"].dtype == np.int32 and head["loss_masks"].dtype == np.uint8
