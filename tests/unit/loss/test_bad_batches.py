"""Bad input is a BatchError that names field, sample and position; never a NaN, never an IndexError."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from plugin.config import LossConfig
from plugin.errors import BatchError, ConfigError
from plugin.loss import loss_inputs, policy_loss_function
from tests.unit.loss.sample_batches import CONFIGS, random_batch, run

MASKS = [[1, 1], [1, 0, 1]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30, -1e30, 2e4])
@pytest.mark.parametrize(
    "field",
    ["advantages", "rollout_log_probs", "log_probs", "ref_log_probs", "teacher_log_probs"],
)
def test_an_unmasked_bad_value_is_named_with_field_sample_and_position(
    field: str, bad: float
) -> None:
    batch, logits = random_batch(MASKS)
    batch[field][1][2] = bad
    with pytest.raises(BatchError, match=rf"^{field} is .* at sample 1, position 2"):
        run(LossConfig(**CONFIGS["ppo"]), batch, logits)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_logits_of_an_unmasked_token_are_named(bad: float) -> None:
    batch, logits = random_batch(MASKS)  # prompts of 1 and 2: sample 1 begins at row 3
    logits[0, 3 + 2 - 1 + 2] = bad
    with pytest.raises(BatchError, match="cur_log_probs is nan at sample 1, position 2"):
        run(LossConfig(), batch, logits)


def test_a_token_outside_the_vocabulary_is_named() -> None:
    batch, logits = random_batch(MASKS)
    batch["unconcat_tokens"][0][1] = 1000
    with pytest.raises(BatchError, match="cur_log_probs is -inf at sample 0, position 0"):
        run(LossConfig(), batch, logits)


@pytest.mark.parametrize("field", ["rollout_log_probs", "log_probs"])
def test_a_huge_log_ratio_is_a_misaligned_log_prob(field: str) -> None:
    batch, logits = random_batch(MASKS)
    batch[field][0][1] = -100.0
    with pytest.raises(BatchError, match=rf"cur_log_probs - {field} is .*sample 0, position 1"):
        run(LossConfig(), batch, logits)


def test_checks_can_be_turned_off_and_never_stop_masked_values() -> None:
    batch, logits = random_batch(MASKS)
    batch["advantages"][1][1] = math.nan  # masked
    run(LossConfig(validate_batch="always"), batch, logits)
    batch["ref_log_probs"][1][2] = math.nan  # unmasked, but nothing uses it
    run(LossConfig(validate_batch="never"), batch, logits)
    with pytest.raises(BatchError):
        run(LossConfig(validate_batch="always"), batch, logits)


@pytest.mark.parametrize(
    "field",
    ["advantages", "rollout_log_probs", "log_probs", "ref_log_probs", "teacher_log_probs"],
)
def test_a_field_of_the_wrong_length_is_named(field: str) -> None:
    batch, logits = random_batch(MASKS)
    batch[field][1] = torch.zeros(4)
    with pytest.raises(BatchError, match=rf"{field} has lengths \[2, 4\] .*\[2, 3\]"):
        policy_loss_function(LossConfig(), batch, logits, torch.sum)
    batch[field] = batch[field][:1]
    with pytest.raises(BatchError, match=rf"{field} has lengths \[2\] .*\[2, 3\]"):
        policy_loss_function(LossConfig(), batch, logits, torch.sum)


def change(batch: dict[str, Any], **columns: Any) -> dict[str, Any]:
    return {**batch, **columns}


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"loss_masks": [torch.ones(2), torch.ones(4)]}, r"loss_masks have lengths \[2, 4\]"),
        ({"loss_masks": [torch.ones(2)]}, r"loss_masks have lengths \[2\]"),
        ({"total_lengths": [3]}, "1 total_lengths for 2 response_lengths"),
        ({"total_lengths": [3, 6]}, r"unconcat_tokens have lengths \[3, 5\] .*\[3, 6\]"),
        ({"response_lengths": [3, 3]}, "total length 3 and response length 3"),
        ({"unconcat_tokens": [torch.zeros(3, dtype=torch.int64)]}, r"unconcat_tokens have lengths"),
        ({"advantages": None}, "the batch has no advantages"),
        ({"loss_masks": None}, "the batch has no loss_masks"),
        ({"unconcat_tokens": None}, "the batch has no unconcat_tokens"),
        ({"total_lengths": None}, "the batch has no total_lengths"),
        ({"response_lengths": None}, "the batch has no response_lengths"),
    ],
)
def test_columns_that_do_not_fit_each_other_are_refused(
    columns: dict[str, Any], message: str
) -> None:
    batch, logits = random_batch(MASKS)
    with pytest.raises(BatchError, match=message):
        policy_loss_function(LossConfig(), change(batch, **columns), logits, torch.sum)


def test_too_few_rows_of_logits_are_refused() -> None:
    batch, logits = random_batch(MASKS)
    with pytest.raises(BatchError, match="logits have 5 rows but the samples need row 6"):
        policy_loss_function(LossConfig(), batch, logits[:, :5], torch.sum)


def test_logits_of_a_batch_of_rows_are_refused() -> None:
    batch, logits = random_batch(MASKS)
    with pytest.raises(BatchError, match=r"expected \[1, T, V\] or \[T, V\]"):
        policy_loss_function(LossConfig(), batch, logits.expand(2, -1, -1), torch.sum)


def test_packed_logits_may_come_with_or_without_their_batch_dimension() -> None:
    batch, logits = random_batch(MASKS)
    config = LossConfig()
    with_dimension = policy_loss_function(config, batch, logits, torch.sum)[0]
    without = policy_loss_function(config, batch, logits[0], torch.sum)[0]
    assert torch.equal(with_dimension, without)


def test_cur_log_probs_of_the_wrong_length_are_refused() -> None:
    batch, _ = random_batch(MASKS)
    with pytest.raises(BatchError, match="cur_log_probs has 4 tokens but the samples have 5"):
        loss_inputs(LossConfig(), batch, torch.zeros(4))


@pytest.mark.parametrize(
    "flags, feature",
    [
        ({"use_tis": True}, "--use-tis"),
        ({"use_rollout_kl_loss": True}, "--use-rollout-kl-loss"),
        ({"use_rollout_logprobs": True}, "--use-rollout-logprobs"),
        ({"get_mismatch_metrics": True}, "--get-mismatch-metrics"),
        *(({"policy_loss": n}, f"--policy-loss {n}") for n in ("icepop", "dppo_tv", "dppo", "ipo_kl")),
    ],
)  # fmt: skip
def test_missing_rollout_log_probs_stop_every_feature_that_needs_them(
    flags: dict[str, Any], feature: str
) -> None:
    batch, logits = random_batch(MASKS)
    del batch["rollout_log_probs"]
    config = LossConfig(**flags)
    with pytest.raises(ConfigError, match=f"{feature} needs rollout_log_probs"):
        policy_loss_function(config, batch, logits, torch.sum)
    with pytest.raises(ConfigError, match=f"{feature} needs rollout_log_probs"):
        loss_inputs(config, batch, torch.zeros(5))
    policy_loss_function(LossConfig(), batch, logits, torch.sum)  # plain PPO needs none


def test_missing_reference_or_teacher_log_probs_are_config_errors() -> None:
    batch, logits = random_batch(MASKS)
    without = change(batch, ref_log_probs=None, teacher_log_probs=None)
    with pytest.raises(ConfigError, match="--use-kl-loss needs ref_log_probs"):
        policy_loss_function(LossConfig(use_kl_loss=True), without, logits, torch.sum)
    config = LossConfig(policy_loss="icepop", teacher_tau=0.1)
    with pytest.raises(ConfigError, match="no teacher_log_probs"):
        policy_loss_function(config, without, logits, torch.sum)
