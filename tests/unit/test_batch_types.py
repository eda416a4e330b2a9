"""Samples, batches, microbatches: one table of fields, checked and padded by walking it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from plugin.batch_types import FIELDS, Microbatch, RolloutBatch, RolloutSample
from plugin.config import LossConfig
from plugin.errors import BatchError
from plugin.loss import policy_loss_function
from plugin.ragged import Ragged


def sample(**changes: Any) -> RolloutSample:
    """Prompt [5, 6], response [7, 8, 9] whose middle token came from a tool."""
    fields: dict[str, Any] = {
        "tokens": torch.tensor([5, 6, 7, 8, 9]),
        "response_length": 3,
        "loss_mask": torch.tensor([1, 0, 1]),
        "reward": 1.0,
        "rollout_log_probs": torch.tensor([-0.5, math.nan, -1.5]),
    }
    return RolloutSample(**{**fields, **changes})


ROUTES = torch.zeros(5, 2, 3, dtype=torch.uint8)
TOPK = {
    "teacher_topk_ids": torch.tensor([[2, 0], [1, 1], [4, 3]], dtype=torch.int32),
    "teacher_topk_log_probs": torch.tensor([[-1.0, -2.0], [9.0, 9.0], [-0.5, -3.0]]),
}
#: The middle token is masked; the last one was drawn from a single id.
HEAD = {
    "rollout_topk_token_ids": torch.tensor([[2, 7], [99, 99], [9, -1]], dtype=torch.int32),
    "rollout_topk_log_probs": torch.tensor([[-1.0, -2.0], [math.nan, 9.0], [0.0, math.nan]]),
}


def full_batch() -> RolloutBatch:
    """A batch in which every field of the table is present."""
    more = {
        "routed_experts": ROUTES,
        "routed_weights": torch.full((5, 2, 3), 1 / 3),
        "sampling_mask": Ragged(torch.tensor([2, 7, 9], dtype=torch.int32), [2, 0, 1]),
    }
    batch = RolloutBatch.from_samples([sample(**more), sample(**more, reward=0.0)])
    for name, field in FIELDS.items():
        if name not in batch:
            per_sample: Any = 1.0 if field.shape == "scalar" else torch.full((3,), -0.5)
            if field.shape == "topk":
                per_sample = (TOPK | HEAD)[name]
            batch = batch.with_column(name, [per_sample, per_sample])
    batch.check()
    return batch


def test_samples_become_columns() -> None:
    batch = RolloutBatch.from_samples([sample(), sample(reward=0.5, group_index=3, weight_version=2)])  # fmt: skip
    assert len(batch) == 2
    assert batch.columns["total_lengths"].tolist() == [5, 5]
    assert batch.columns["response_lengths"].tolist() == [3, 3]
    assert batch.columns["rewards"].tolist() == [1.0, 0.5]
    assert batch.columns["group_index"].tolist() == [0, 3]
    assert [row.tolist() for row in batch.columns["weight_versions"]] == [[0, 0, 0], [2, 2, 2]]
    assert "rollout_log_probs" in batch and "rollout_routed_experts" not in batch


def test_one_version_stands_for_all_tokens_of_its_sample() -> None:
    lengths = {"total_lengths": [5, 5], "response_lengths": [3, 2]}
    for given, expected in (
        ([4, 7], [[4, 4, 4], [7, 7]]),
        (torch.tensor([4, 7]), [[4, 4, 4], [7, 7]]),
        (np.array([4, 7]), [[4, 4, 4], [7, 7]]),
        ([torch.tensor([4, 4, 5]), 7], [[4, 4, 5], [7, 7]]),
        ([[4, 4, 5], [6, 7]], [[4, 4, 5], [6, 7]]),
    ):
        columns: dict[str, Any] = {**lengths, "weight_versions": given}
        column = RolloutBatch(columns).columns["weight_versions"]
        assert [row.tolist() for row in column] == expected
        assert column.values.dtype == torch.int64


def test_versions_that_do_not_fit_their_sample_are_errors() -> None:
    for given, message in (
        (torch.tensor([1, 2]), "weight_versions of sample 0 has length 2, expected 3"),
        (torch.tensor([1.0, 2.0, 2.0]), "versions are integers"),
        ("7", "weight_versions of sample 0 is '7'"),
    ):
        with pytest.raises(BatchError, match=message):
            RolloutBatch.from_samples([sample(weight_version=given)])


def test_no_samples_make_an_empty_batch() -> None:
    batch = RolloutBatch.from_samples([])
    assert len(batch) == 0
    batch.check()


def test_an_optional_field_that_only_some_samples_have_is_an_error() -> None:
    with pytest.raises(BatchError, match="sample 1 has no rollout_log_probs but others have"):
        RolloutBatch.from_samples([sample(), sample(rollout_log_probs=None)])


def test_selecting_and_joining_keep_samples_whole() -> None:
    batch = RolloutBatch.from_samples([sample(reward=float(i)) for i in range(4)])
    picked = batch.select([2, 0])
    assert picked.columns["rewards"].tolist() == [2.0, 0.0]
    joined = picked.concatenated(batch.select([3]))
    assert joined.columns["rewards"].tolist() == [2.0, 0.0, 3.0] and len(joined) == 3
    joined.check()
    with pytest.raises(BatchError, match="differ in the fields advantages"):
        joined.concatenated(picked.with_column("advantages", [torch.zeros(3)] * 2))


def test_columns_must_be_known_and_complete() -> None:
    batch = RolloutBatch.from_samples([sample()])
    with pytest.raises(BatchError, match="unknown field 'advantage'"):
        batch.with_column("advantage", [0])
    with pytest.raises(BatchError, match="advantages has 2 entries for 1 samples"):
        batch.with_column("advantages", [0, 0])
    with pytest.raises(BatchError, match="unknown field 'extra'"):
        RolloutBatch({**batch.columns, "extra": [0]}).check()
    columns = {name: values for name, values in batch.columns.items() if name != "loss_masks"}
    with pytest.raises(BatchError, match="the batch has no loss_masks"):
        RolloutBatch(columns).check()
    with pytest.raises(BatchError, match="loss_masks has 0 entries for 1 samples"):
        RolloutBatch({**batch.columns, "loss_masks": []}).check()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"response_length": 5}, "total length 5 and response length 5"),
        ({"response_length": -1}, "response length -1"),
        ({"response_length": 2}, "loss_masks of sample 0 has length 3, expected 2"),
        ({"rollout_log_probs": torch.zeros(4)}, "rollout_log_probs of sample 0 has length 4"),
        ({"routed_experts": torch.zeros(3, 1, 1)}, "rollout_routed_experts of sample 0 has length 3"),
        ({"tokens": torch.tensor([5.0, 6, 7, 8, 9])}, "unconcat_tokens are torch.float32"),
        ({"tokens": torch.tensor([5, 6, 7, -1, 9])}, "is -1 at position 3"),
        ({"reward": math.nan}, "rewards of sample 0 is nan"),
        ({"reward": math.inf}, "rewards of sample 0 is inf"),
        ({"rollout_log_probs": torch.tensor([-0.5, 0, math.nan])},
         "rollout_log_probs of sample 0 is nan at position 2"),
        ({"rollout_log_probs": torch.tensor([-math.inf, 0, -1])}, "is -inf at position 0"),
        ({"rollout_log_probs": torch.tensor([-0.5, 0, -1e30])}, "at position 2"),
        ({"rollout_log_probs": torch.tensor([0.5, 0, -1])}, "at most 0.1"),
    ],
)  # fmt: skip
def test_a_bad_sample_is_named_with_field_and_position(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        RolloutBatch.from_samples([sample(**changes)])


@pytest.mark.parametrize("name", [
    n for n, f in FIELDS.items() if f.dtype == torch.float32 and f.shape != "routes"
])  # fmt: skip
def test_every_float_field_of_the_table_is_checked_where_unmasked(name: str) -> None:
    batch = full_batch()
    value: Any = math.nan if FIELDS[name].shape == "scalar" else torch.tensor([-0.5, 0, math.nan])
    good = batch.columns[name][0]
    if FIELDS[name].shape == "topk":
        # The last sampler's head has one id, the first.
        other = torch.full((3,), -2.0)
        value = torch.stack([value, other] if "rollout" in name else [other, value], dim=1)
    with pytest.raises(BatchError, match=f"{name} of sample 1 is nan"):
        batch.with_column(name, [good, value]).check()
    if FIELDS[name].shape == "response":
        masked = torch.tensor([-0.5, math.nan, -0.5])
        batch.with_column(name, [good, masked]).check()


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        (
            "teacher_topk_ids",
            [7, 7],
            "teacher_topk_ids of sample 1 contain an id twice at position 2",
        ),
        ("teacher_topk_ids", [7, 12], "contain an id outside the vocabulary of 12 at position 2"),
        ("teacher_topk_ids", [-1, 2], "contain an id outside the vocabulary of 12 at position 2"),
        ("teacher_topk_log_probs", [-0.1, -0.2], "add up to more than 1 at position 2"),
        ("teacher_topk_log_probs", [-0.1, 0.2], "of sample 1 is 0.2.* at position 2"),
    ],
)
def test_a_teachers_ids_are_different_ones_of_one_distribution(
    name: str, row: list[float], message: str
) -> None:
    batch = full_batch()
    good, bad = batch.columns[name][0], batch.columns[name][0].clone()
    bad[2] = torch.tensor(row)
    with pytest.raises(BatchError, match=message):
        batch.with_column(name, [good, bad]).check(vocabulary=12)
    with pytest.raises(BatchError, match=f"the batch has only {name}"):
        other = next(n for n in TOPK if n != name)
        batch.without_column(other).check()
    with pytest.raises(BatchError, match=r"both are \[response, k\] per sample"):
        batch.with_column(name, [good[:, :1], good[:, :1]]).check()


@pytest.mark.parametrize(
    ("ids", "log_probs", "message"),
    [
        ([7, 7], [-1.0, -2.0], "rollout_topk_token_ids of sample 1 contain an id twice at position 2"),
        ([7, 12], [-1.0, -2.0], "contain an id outside the vocabulary of 12"),
        ([7, -2], [-1.0, -2.0], "contain an id outside the vocabulary of 12"),
        ([7, 1], [-0.1, -0.2], "add up to more than 1 at position 2"),
        ([7, 1], [-1.0, math.nan], "rollout_topk_log_probs of sample 1 is nan at position 2"),
        ([7, 1], [-1.0, -math.inf], "rollout_topk_log_probs of sample 1 is -inf at position 2"),
        ([-1, -1], [-1.0, -2.0], "are all absent at position 2"),
        ([5, -1], [-1.0, -2.0], "are not all among the kept ids at position 2"),
    ],
)  # fmt: skip
def test_a_samplers_ids_are_different_ones_that_it_could_draw(
    ids: list[int], log_probs: list[float], message: str
) -> None:
    batch = full_batch()
    for name, row in (("rollout_topk_token_ids", ids), ("rollout_topk_log_probs", log_probs)):
        good, bad = batch.columns[name][0], batch.columns[name][0].clone()
        bad[2] = torch.tensor(row)
        batch = batch.with_column(name, [good, bad])
    if "kept" not in message:
        batch = batch.without_column("rollout_kept_ids").without_column("rollout_kept_counts")
    with pytest.raises(BatchError, match=message):
        batch.check(vocabulary=12)


@pytest.mark.parametrize(
    "weights, message",
    [
        ([[math.nan, 0.5]], r"of sample 1, token 2, MoE layer 0 are \[nan, 0.5\]"),
        ([[-0.5, 1.5]], r"are \[-0.5, 1.5\]; weights are finite, at least 0"),
        ([[math.inf, 0.5]], r"are \[inf, 0.5\]"),
        ([[0.0, 0.0]], "not all 0"),
    ],
)
def test_a_bad_weight_of_a_route_is_named_with_sample_token_and_layer(
    weights: list[list[float]], message: str
) -> None:
    routes = torch.tensor([[[0, 1]]] * 5, dtype=torch.int8)
    good = torch.full((5, 1, 2), 0.5)
    bad = good.clone()
    bad[2] = torch.tensor(weights)
    samples = [sample(routed_experts=routes, routed_weights=w) for w in (good, bad)]
    with pytest.raises(BatchError, match=message):
        RolloutBatch.from_samples(samples)
    # A token without a route may hold anything.
    routes = routes.clone()
    routes[2] = -1
    RolloutBatch.from_samples([sample(routed_experts=routes, routed_weights=bad)])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"routed_experts": None}, "weights of which experts"),
        ({"routed_weights": torch.ones(5, 2, 2)}, r"shape \[2, 2\] per token, .* \[2, 3\]"),
        ({"routed_weights": torch.ones(4, 2, 3)}, "rollout_routed_weights of sample 0 has length 4"),
        ({"routed_weights": torch.ones(5, 2, 3, dtype=torch.int64)}, "are torch.int64"),
    ],
)  # fmt: skip
def test_weights_of_routes_need_the_routes_and_their_shape(
    changes: dict[str, Any], message: str
) -> None:
    routed = {"routed_experts": ROUTES, "routed_weights": torch.ones(5, 2, 3)}
    with pytest.raises(BatchError, match=message):
        RolloutBatch.from_samples([sample(**(routed | changes))])


def test_half_precision_log_probs_pass_the_check() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        log_probs = torch.tensor([-0.5, math.nan, -1.5], dtype=dtype)
        RolloutBatch.from_samples([sample(rollout_log_probs=log_probs)])


def test_a_sample_without_a_response_is_fine() -> None:
    empty = sample(response_length=0, loss_mask=torch.zeros(0), rollout_log_probs=torch.zeros(0))
    assert len(RolloutBatch.from_samples([empty, sample()])) == 2
    # Nor is a rank's share of such samples alone, with ids per token.
    none = Ragged(torch.zeros(0, dtype=torch.int32), [])
    alone = RolloutBatch.from_samples([replace(empty, sampling_mask=none)])
    for name, column in HEAD.items():
        alone = alone.with_column(name, [column[:0]])
    alone.check(vocabulary=12)


def test_a_padding_microbatch_has_every_field_of_the_table() -> None:
    batch = full_batch()
    assert set(batch.columns) == set(FIELDS)  # a field added later is covered here too
    padding = Microbatch.padding_like(batch)
    assert padding.is_padding and set(padding.batch.columns) == set(FIELDS)
    padding.batch.check()
    for name, field in FIELDS.items():
        (value,) = padding.batch.columns[name]
        if isinstance(value, torch.Tensor):
            assert value.dtype == (field.dtype or torch.uint8), name
    assert not padding.batch.columns["loss_masks"][0].any()
    routes = padding.batch.columns["rollout_routed_experts"][0]
    assert routes.shape == (2, 2, 3) and routes[0, 0].tolist() == [0, 1, 2]  # distinct experts
    weights = padding.batch.columns["rollout_routed_weights"][0]
    torch.testing.assert_close(weights, torch.full((2, 2, 3), 1 / 3))


def test_a_padding_microbatch_contributes_nothing() -> None:
    columns = Microbatch.padding_like(full_batch()).batch.columns
    logits = torch.randn(1, 2, 10, requires_grad=True)
    config = LossConfig(use_tis=True, use_kl_loss=True, kl_loss_coef=1.0, entropy_coef=1.0)
    loss, metrics = policy_loss_function(config, columns, logits, torch.sum)
    loss.backward()
    assert loss.item() == 0.0 and logits.grad is not None and not logits.grad.any()
    assert all(value.item() == 0.0 for value in metrics.values())


def test_a_real_sample_that_is_fully_masked_is_not_padding() -> None:
    batch = RolloutBatch.from_samples([sample(loss_mask=torch.zeros(3))])
    assert not Microbatch(batch).is_padding


def test_what_is_reduced_over_each_tensor_knows_empty_ones() -> None:
    column = Ragged(torch.tensor([3, 1, 2, 5]), [0, 2, 0, 1, 1, 0])
    assert column.reduced(np.minimum, 9).tolist() == [9, 1, 9, 2, 5, 9]
    assert column.reduced(np.add, 0).tolist() == [0, 4, 0, 2, 5, 0]
    # Of booleans the number, not whether there is any; of none nothing.
    assert column.like(column.values > 1).reduced(np.add, 0).tolist() == [0, 1, 0, 1, 1, 0]
    assert Ragged(torch.zeros(0, dtype=torch.int64), []).reduced(np.add, 0).tolist() == []
