"""The loss over padded matrices is the loss over the ragged batch that they pad."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plugin.adapters.padded_loss import PaddedBatch, padded_loss
from plugin.config import LossConfig
from plugin.errors import BatchError, ConfigError
from plugin.loss import compute_loss, loss_inputs, reduce_loss
from tests.unit.adapters.padded_samples import (
    ADVANTAGES,
    MASK,
    gradient,
    spoiled,
    three_policies,
    token_mean,
)

CONFIGS: dict[str, dict[str, Any]] = {
    "ppo with TIS": {"use_tis": True, "tis_clip": 1.3},
    "sequence TIS": {
        "use_tis": True,
        "custom_tis_function_path": "plugin.ppo_utils.sequence_tis_function",
    },
    "gspo": {"policy_loss": "gspo"},
    "icepop and rollout KL": {
        "policy_loss": "icepop",
        "icepop_ratio_low": 0.8,
        "icepop_ratio_high": 1.25,
        "use_rollout_kl_loss": True,
        "rollout_kl_loss_coef": 0.3,
    },
}


def batch_of(policies: dict[str, torch.Tensor]) -> PaddedBatch:
    return PaddedBatch(
        policies["cur"],
        MASK,
        ADVANTAGES,
        train_log_probs=policies["train"],
        rollout_log_probs=policies["rollout"],
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_changes_neither_loss_nor_gradient(name: str) -> None:
    config, policies = LossConfig(**CONFIGS[name]), three_policies()
    lengths = (3, 2)  # without the padded columns

    def ragged(values: torch.Tensor) -> list[torch.Tensor]:
        return [row[:length] for row, length in zip(values, lengths, strict=True)]

    columns = {
        "total_lengths": [7, 5],
        "response_lengths": list(lengths),
        "loss_masks": ragged(MASK),
        "advantages": ragged(ADVANTAGES),
        "log_probs": ragged(policies["train"]),
        "rollout_log_probs": ragged(policies["rollout"]),
    }
    inputs = loss_inputs(config, columns, torch.cat(ragged(policies["cur"])))
    outputs = compute_loss(config, inputs)
    expected, _ = reduce_loss(config, outputs, token_mean)
    loss, _ = padded_loss(config, batch_of(policies), token_mean)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, policies["cur"]), gradient(expected, policies["cur"]))


@pytest.mark.parametrize("name", CONFIGS)
def test_garbage_in_the_padding_changes_nothing(name: str) -> None:
    config, policies = LossConfig(**CONFIGS[name]), three_policies()
    clean, clean_metrics = padded_loss(config, batch_of(policies), token_mean)
    dirty_policies = {
        "cur": spoiled(policies["cur"]).requires_grad_(),
        "train": spoiled(policies["train"]),
        "rollout": spoiled(policies["rollout"]),
    }
    dirty, dirty_metrics = padded_loss(config, batch_of(dirty_policies), token_mean)
    assert torch.equal(dirty, clean)
    assert torch.equal(gradient(dirty, dirty_policies["cur"]), gradient(clean, policies["cur"]))
    assert dirty_metrics == clean_metrics


def test_metrics_are_means_over_tokens() -> None:
    cur = torch.zeros(1, 2).requires_grad_()
    rollout = torch.tensor([[0.0, -1.0]])
    config = LossConfig(use_tis=True)
    batch = PaddedBatch(cur, torch.ones(1, 2), torch.ones(1), rollout_log_probs=rollout)
    _, metrics = padded_loss(config, batch, torch.sum)
    # train = cur = 0, so ratios are 1 and e: mean 1.859; the second exceeds the clip of 2
    assert metrics["tis"].item() == pytest.approx((1 + 2.718281828) / 2)
    assert metrics["tis_clipfrac"].item() == 0.5


def test_weights_of_the_framework_act_on_the_policy_loss_alone() -> None:
    policies = three_policies()
    config = LossConfig(policy_loss="reinforce", use_rollout_kl_loss=True, rollout_kl_loss_coef=1.0)
    plain, metrics = padded_loss(config, batch_of(policies), torch.sum)
    doubled, _ = padded_loss(config, batch_of(policies), torch.sum, weights=torch.full((2, 4), 2.0))
    penalty = metrics["rollout_kl"] * MASK.sum()
    torch.testing.assert_close(doubled - penalty, 2 * (plain - penalty))


def test_two_corrections_at_once_are_refused() -> None:
    config = LossConfig(use_tis=True)
    with pytest.raises(ConfigError, match="counted twice"):
        padded_loss(config, batch_of(three_policies()), torch.sum, weights=MASK)


def test_shapes_that_do_not_fit_are_named() -> None:
    batch = PaddedBatch(torch.zeros(2, 3), torch.ones(2, 4), torch.zeros(2))
    with pytest.raises(BatchError, match=r"\(2, 3\) and the mask \(2, 4\)"):
        padded_loss(LossConfig(), batch, torch.sum)
