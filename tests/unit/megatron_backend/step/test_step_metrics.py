"""Metrics of a step from its table of sums."""

from __future__ import annotations

import math

import pytest
import torch

from plugin.config import TrainerConfig
from plugin.loss.inputs import loss_inputs
from plugin.loss.objective import compute_loss
from plugin.megatron_backend.step.step_metrics import record_step, step_metrics
from plugin.ppo_utils.sufficient_statistics import StatisticsTable


def test_a_mean_whose_weights_sum_to_less_than_one_is_still_divided_by_them() -> None:
    # Samples divided by the token count of a longer rollout: weights 0.3 + 0.2, weighted loss 0.2: 0.2 / 0.5 = 0.4.
    table = StatisticsTable()
    table.add("loss:sum", 0.2)
    table.add("loss:count", torch.tensor([0.3, 0.2]).sum())
    table.add("num_tokens", 5)
    assert step_metrics(table)["loss"] == pytest.approx(0.4)
    assert step_metrics(table)["num_tokens"] == 5.0


def test_a_mean_over_nothing_is_zero() -> None:
    table = StatisticsTable()
    table.add_mean("tis", torch.tensor([torch.nan]), torch.tensor([False]))
    assert step_metrics(table) == {"tis": 0.0, "num_tokens": 0.0}


@pytest.mark.parametrize("known", [True, False])
def test_the_error_of_an_approximated_old_policy_is_reported_where_the_true_one_is_known(
    known: bool,
) -> None:
    # v_rollout 4, v_old 5, v_cur 5.5: alpha 2/3. rollout -1, cur -2: -1 - 2/3 = -5/3; rollout -3, cur -2: -7/3.
    # The trainer's own are -1.5 and -2: |-5/3 + 1.5| = 1/6, |-7/3 + 2| = 1/3; the third token is masked.
    batch = {
        "total_lengths": [4],
        "response_lengths": [3],
        "loss_masks": [torch.tensor([1, 1, 0])],
        "advantages": [torch.ones(3)],
        "rollout_log_probs": [torch.tensor([-1.0, -3.0, -1.0])],
        "weight_versions": [4],
        "trainer_version": 5,
        "current_version": 5.5,
    }
    if known:
        batch["log_probs"] = [torch.tensor([-1.5, -2.0, -9.0])]
    config = TrainerConfig(train_log_probs="approximate", use_tis=True)
    inputs = loss_inputs(config, batch, torch.full((3,), -2.0).requires_grad_())
    table = StatisticsTable()
    columns = {**batch, "weight_versions": [torch.full((3,), 4)]}
    record_step(table, config, inputs, compute_loss(config, inputs), torch.ones(3), columns)
    found = step_metrics(table).get("old_log_prob_error")
    assert found == (pytest.approx(0.25) if known else None)


@pytest.mark.parametrize("cut", [1, 2])
def test_the_chi_square_of_sequences_is_of_products_of_ratios(cut: int) -> None:
    # train - rollout: 0.1 + 0.2 of the first sample, -0.4 of the second (its other token is masked), none of the third.
    # (exp(0.6) + exp(-0.8)) / 2 - 1 = 0.1357
    columns = {
        "loss_masks": [torch.tensor([1, 1]), torch.tensor([0, 1]), torch.tensor([0])],
        "advantages": [torch.ones(2), torch.ones(2), torch.ones(1)],
        "rollout_log_probs": [torch.tensor([-1.0, -2.0]), torch.tensor([math.nan, -1.0]), torch.tensor([-1.0])],
        "log_probs": [torch.tensor([-0.9, -1.8]), torch.tensor([-1.0, -1.4]), torch.tensor([-5.0])],
    }  # fmt: skip
    table = StatisticsTable()
    for part in (slice(0, cut), slice(cut, 3)):
        own = {name: values[part] for name, values in columns.items()}
        lengths = [len(mask) for mask in own["loss_masks"]]
        own |= {"response_lengths": lengths, "total_lengths": [1 + n for n in lengths]}
        config = TrainerConfig()
        inputs = loss_inputs(config, own, torch.full((sum(lengths),), -1.5).requires_grad_())
        outputs = compute_loss(config, inputs)
        record_step(table, config, inputs, outputs, torch.ones(sum(lengths)), own)
    expected = (math.exp(0.6) + math.exp(-0.8)) / 2 - 1
    assert step_metrics(table)["mismatch/sequence_chi2"] == pytest.approx(expected, rel=1e-5)
