"""Metrics and advantages that say what they are named after."""

from __future__ import annotations

import math

import pytest
import torch

from plugin.adapters.padded_loss import PaddedBatch, padded_loss
from plugin.config import LossConfig, TrainerConfig
from plugin.loss.inputs import loss_inputs
from plugin.loss.objective import compute_loss
from plugin.megatron_backend.step.step_metrics import record_step, step_metrics
from plugin.ppo_utils import (
    gae_advantages,
    grpo_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    reinforce_plus_plus_returns,
    rloo_advantages,
)
from plugin.ppo_utils.sufficient_statistics import StatisticsTable

pytestmark = pytest.mark.hostile


def batch_of(**log_probs: list[float]) -> dict[str, object]:
    length = len(log_probs["rollout_log_probs"])
    return {
        "response_lengths": [length],
        "total_lengths": [length + 1],
        "loss_masks": [torch.ones(length, dtype=torch.int64)],
        "advantages": [torch.ones(length)],
        **{name: [torch.tensor(values)] for name, values in log_probs.items()},
    }


@pytest.mark.parametrize("recomputed", [True, False])
def test_the_difference_to_the_engine_is_never_measured_against_the_engine(
    recomputed: bool,
) -> None:
    # cur -1, recomputed -1.5, rollout -2: |train - rollout| is 0.5, or 1 where cur is all there is.
    batch = batch_of(rollout_log_probs=[-2.0, -1.0])
    if recomputed:
        batch["log_probs"] = [torch.tensor([-1.5, -1.0])]
    config = TrainerConfig(use_rollout_logprobs=True, get_mismatch_metrics=True)
    inputs = loss_inputs(config, batch, torch.full((2,), -1.0).requires_grad_())
    outputs = compute_loss(config, inputs)
    want = [0.5, 0.0] if recomputed else [1.0, 0.0]
    assert outputs.metrics["train_rollout_logprob_abs_diff"].values.tolist() == want
    # What a correction would do is told of the same two policies.
    assert outputs.metrics["tis"].values.tolist() == pytest.approx([math.exp(want[0]), 1.0])
    assert torch.equal(inputs.proximal_log_probs, torch.tensor([-2.0, -1.0])), (
        "the loss is unchanged"
    )
    table = StatisticsTable()
    record_step(table, config, inputs, outputs, torch.ones(2), batch)
    assert step_metrics(table)["mismatch/abs_log_ratio"] == pytest.approx(want[0] / 2)


def test_cispo_never_reports_a_mean_in_place_of_an_extreme() -> None:
    # Ratios 0.5, 1.1, 4 with weights 0.8, 1.1, 1.2; a masked fourth token would be the smallest.
    logs = torch.tensor([0.5, 1.1, 4.0, 0.01]).log()
    batch = batch_of(rollout_log_probs=[-1.0] * 4, log_probs=[-2.0] * 4)
    batch["loss_masks"] = [torch.tensor([1, 1, 1, 0])]
    config = TrainerConfig(policy_loss="cispo", use_tis=True)
    table = StatisticsTable()
    for part in (slice(0, 2), slice(2, 4)):
        columns = {
            name: [values[0][part]] if torch.is_tensor(values[0]) else values  # type: ignore[index]
            for name, values in batch.items()
        } | {"response_lengths": [2], "total_lengths": [3]}
        inputs = loss_inputs(config, columns, (logs - 2.0)[part].requires_grad_())
        record_step(table, config, inputs, compute_loss(config, inputs), torch.ones(2), columns)
    metrics = step_metrics(table)
    assert metrics["cispo/ratio_min"] == pytest.approx(0.5)
    assert metrics["cispo/ratio_max"] == pytest.approx(4.0)
    assert metrics["cispo/ratio_clamped_mean"] == pytest.approx((0.8 + 1.1 + 1.2) / 3)


def test_an_adapter_reports_cispos_extremes_over_unmasked_tokens() -> None:
    mask = torch.tensor([[True, True, False]])
    padded = PaddedBatch(
        mask=mask,
        cur_log_probs=torch.tensor([[0.5, 4.0, 0.01]]).log() - 2.0,
        train_log_probs=torch.full((1, 3), -2.0),
        advantages=torch.ones(1, 3),
    )
    _, metrics = padded_loss(LossConfig(policy_loss="cispo"), padded, lambda values: values.sum())
    found = [float(metrics[f"cispo/ratio_{kind}"]) for kind in ("min", "max", "clamped_mean")]
    assert found == pytest.approx([0.5, 4.0, (0.8 + 1.2) / 2])


def test_advantages_and_returns_of_float64_never_lose_digits() -> None:
    # 1 + 1e-12 is 1 in float32; the group's mean is 1.
    rewards = torch.tensor([1 - 1e-12, 1 + 1e-12], dtype=torch.float64)
    groups, masks = torch.zeros(2, dtype=torch.int64), [torch.ones(2), torch.ones(2)]
    values = [torch.zeros(2, dtype=torch.float64)] * 2
    grpo = grpo_advantages(rewards, groups, std_normalization=False)
    assert grpo[1] == pytest.approx(1e-12, rel=1e-3)
    assert rloo_advantages(rewards, groups)[1] == pytest.approx(2e-12, rel=1e-3)
    assert reinforce_plus_plus_returns(rewards, masks)[1].tolist() == [1 + 1e-12] * 2
    assert gae_advantages(rewards, values, masks)[1][1].tolist() == [1 + 1e-12] * 2
    for per_token in (
        reinforce_plus_plus_advantages(rewards, masks),
        reinforce_plus_plus_baseline_advantages(rewards, groups, masks),
        *gae_advantages(rewards.float(), values, masks),
    ):
        assert {tensor.dtype for tensor in per_token} == {torch.float64}
    for half in (torch.float32, torch.bfloat16):
        assert grpo_advantages(rewards.to(half), groups).dtype is torch.float32
        assert reinforce_plus_plus_returns(rewards.to(half), masks)[0].dtype is torch.float32
