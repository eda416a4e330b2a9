"""Reductions: what a token weighs in each, by hand, and what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugin.batch_types import RolloutBatch
from plugin.config import JobConfig, LossConfig
from plugin.config.loss.loss_config import ESTIMATOR_TRAITS, LossReduction
from plugin.errors import BatchError, ConfigError
from plugin.loss import policy_loss_function
from plugin.loss.normalization import token_weights
from plugin.megatron_backend.step.loss_scaling import weigh_samples
from plugin.sharding.sequence_shards import SequenceShards
from tests.unit.loss.sample_batches import random_batch

#: Groups 7 and 3 of two samples each; the last sample carries no loss.
MASKS = [[1, 1, 0], [1], [1, 1, 1, 1], [0, 0]]
GROUPS = [7, 7, 3, 3]


def batch_of(masks: list[list[int]], groups: list[int] | None, **columns: Any) -> RolloutBatch:
    lengths = [len(mask) for mask in masks]
    extra = {} if groups is None else {"group_index": groups}
    return RolloutBatch(
        {
            "unconcat_tokens": [torch.zeros(n + 1, dtype=torch.int64) for n in lengths],
            "total_lengths": [n + 1 for n in lengths],
            "response_lengths": lengths,
            "loss_masks": [torch.tensor(mask) for mask in masks],
            **extra,
            **columns,
        }
    )


def weights_of(batch: RolloutBatch, config: LossConfig) -> tuple[list[float], float]:
    """What every token is multiplied by, and what the sum is divided by."""
    batch, total = weigh_samples(batch, config)
    masks = batch.columns["loss_masks"]
    lengths = batch.columns["response_lengths"].tolist()
    shards = SequenceShards.of(batch.columns["total_lengths"], lengths, torch.device("cpu"))
    weights = token_weights(
        shards,
        shards.local_mask(masks),
        masks,
        per_token=config.per_token,
        mask_sums=batch.columns.get("rollout_mask_sums"),
    )
    return weights.tolist(), total


@pytest.mark.parametrize(
    "reduction, weights, total",
    [
        # tokens with loss: 2, 1, 4, 0
        ("token-mean", [1, 1, 0, 1, 1, 1, 1, 1, 0, 0], 7),
        ("sample-mean", [1 / 2, 1 / 2, 0, 1, *[1 / 4] * 4, 0, 0], 3),
        ("fixed-length", [1 / 8, 1 / 8, 0, 1 / 8, *[1 / 8] * 4, 0, 0], 3),
        # prompts: 2 + 1 tokens, 4 + 0 tokens
        ("prompt-mean", [1 / 3, 1 / 3, 0, 1 / 3, *[1 / 4] * 4, 0, 0], 2),
        # group 7: two samples, 1 / (2 * 2) and 1 / (2 * 1); group 3: one sample with loss, 1 / (1 * 4)
        ("group-mean", [1 / 4, 1 / 4, 0, 1 / 2, *[1 / 4] * 4, 0, 0], 2),
    ],
)
def test_the_weight_of_a_token_is_that_of_the_definition(
    reduction: str, weights: list[float], total: float
) -> None:
    config = LossConfig(loss_reduction=reduction, loss_fixed_length=8)
    found, divisor = weights_of(batch_of(MASKS, GROUPS), config)
    assert found == pytest.approx(weights) and divisor == pytest.approx(total)


@given(
    masks=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=8),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_every_prompt_weighs_the_same_whatever_its_lengths_and_masks(
    masks: list[list[int]], data: st.DataObject
) -> None:
    groups = data.draw(st.lists(st.integers(-3, 3), min_size=len(masks), max_size=len(masks)))
    carrying = {g for g, mask in zip(groups, masks, strict=True) if any(mask)}
    for reduction in ("prompt-mean", "group-mean"):
        weights, total = weights_of(batch_of(masks, groups), LossConfig(loss_reduction=reduction))
        assert total == pytest.approx(len(carrying))
        owners = [g for g, mask in zip(groups, masks, strict=True) for _ in mask]
        for group in carrying:
            mine = [w for w, owner in zip(weights, owners, strict=True) if owner == group]
            assert sum(mine) == pytest.approx(1.0, rel=1e-5)


def test_the_older_flags_mean_the_same() -> None:
    assert LossConfig().reduction == "sample-mean"
    assert LossConfig(policy_loss="icepop").reduction == "token-mean"
    assert LossConfig(calculate_per_token_loss=True).reduction == "token-mean"
    assert (
        LossConfig(policy_loss="icepop", calculate_per_token_loss=False).reduction == "sample-mean"
    )
    assert LossConfig(policy_loss="icepop", loss_reduction="prompt-mean").per_token is False
    assert JobConfig.from_sources({}).reduction == "token-mean", "the built-in job's default"
    assert JobConfig.from_sources({"loss_reduction": "group-mean"}).reduction == "group-mean"
    assert JobConfig(loss_reduction="fixed-length", max_response_length=9).fixed_length == 9


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"loss_reduction": "mean"}, "choose one of token-mean, sample-mean"),
        ({"loss_reduction": "sample-mean", "calculate_per_token_loss": True}, "two different"),
        ({"loss_reduction": "token-mean", "calculate_per_token_loss": False}, "--no-calculate"),
        ({"loss_reduction": "fixed-length"}, "needs --loss-fixed-length"),
        ({"loss_reduction": "prompt-mean", "loss_denominator": "kept"}, "--loss-denominator kept"),
        ({"loss_fixed_length": 0}, "at least 1"),
    ],
)
def test_reductions_that_contradict_each_other_are_refused(
    flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LossConfig(**flags)


def test_a_fixed_length_that_nothing_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match="--loss-fixed-length 8 would do nothing"):
        JobConfig.from_sources({"loss_fixed_length": 8})


def test_a_batch_without_prompts_or_with_divisors_of_its_own_is_refused() -> None:
    config = LossConfig(loss_reduction="group-mean")
    with pytest.raises(BatchError, match="needs group_index"):
        weigh_samples(batch_of(MASKS, None), config)
    with pytest.raises(BatchError, match="both divide the samples"):
        weigh_samples(batch_of(MASKS, GROUPS, rollout_mask_sums=[1.0] * 4), config)


def test_a_callers_reducer_is_never_taken_for_one_over_prompts() -> None:
    batch, logits = random_batch([[1, 1], [1]])
    with pytest.raises(ConfigError, match="the caller supplies the reducer"):
        policy_loss_function(LossConfig(loss_reduction="prompt-mean"), batch, logits, torch.sum)


def test_the_docs_name_every_reduction_and_estimator() -> None:
    page = (Path(__file__).parents[3] / "docs" / "mathematics.md").read_text()
    for name in (*get_args(LossReduction), *ESTIMATOR_TRAITS):
        assert f"`{name}`" in page, name
