"""The factors that undo Megatron's: a simulated schedule must arrive at the one global mean."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plugin.batch_types import RolloutBatch
from plugin.megatron_backend.step.loss_scaling import LossScale, total_weight


def masks(*rows: list[int], **columns: list[float]) -> RolloutBatch:
    return RolloutBatch({"loss_masks": [torch.tensor(row) for row in rows], **columns})


def test_the_total_weight_counts_tokens_or_samples_that_carry_loss() -> None:
    batch = masks([1, 0, 1], [0, 0], [1])
    assert total_weight(batch, per_token=True) == 3.0
    assert total_weight(batch, per_token=False) == 2.0


def test_mask_sums_of_whole_rollouts_replace_those_of_samples() -> None:
    # Two samples of one rollout with 3 tokens together: 2/3 + 1/3 = 1; a third alone: 1/1; a masked one: 0/5.
    batch = masks([1, 1], [1, 0], [1], [0], rollout_mask_sums=[3.0, 3.0, 1.0, 5.0])
    assert total_weight(batch, per_token=False) == pytest.approx(2.0)
    assert total_weight(batch, per_token=True) == 4.0


def schedule(scale: LossScale, ranks: list[list[tuple[float, int]]]) -> float:
    """What Megatron makes of (weighted sum, count) per microbatch and rank: schedule, DDP, finalize_model_grads."""
    total, tokens = 0.0, 0
    for microbatches in ranks:
        for weighted, count in microbatches:
            loss, reported = scale.for_megatron(torch.tensor(weighted), torch.tensor(count))
            assert reported.dtype == torch.int
            if scale.per_token:
                total, tokens = total + float(loss), tokens + int(reported)
            else:
                total += float(loss) / int(reported) / len(microbatches)
    return total / max(tokens, 1) if scale.per_token else total / len(ranks)


def test_per_token_the_schedule_arrives_at_the_mean_over_all_tokens() -> None:
    # (3 + 1 + 0) / (2 + 3 + 0) = 0.8, whatever the number of ranks and microbatches.
    scale = LossScale(per_token=True, total_weight=5.0, num_microbatches=2, dp_cp_size=2)
    assert schedule(scale, [[(3.0, 2), (0.0, 0)], [(1.0, 3), (0.0, 0)]]) == pytest.approx(0.8)


def test_per_sample_the_schedule_arrives_at_the_mean_over_all_samples() -> None:
    # Sums of weighted losses 3, 1, 2 over 4 samples: 6 / 4 = 1.5.
    scale = LossScale(per_token=False, total_weight=4.0, num_microbatches=2, dp_cp_size=2)
    assert schedule(scale, [[(3.0, 2), (1.0, 1)], [(2.0, 5), (0.0, 0)]]) == pytest.approx(1.5)


@pytest.mark.parametrize("per_token", [True, False])
def test_a_batch_without_any_token_to_learn_from_gives_zero_and_not_nan(per_token: bool) -> None:
    weight = total_weight(masks([0, 0]), per_token=per_token)
    scale = LossScale(per_token=per_token, total_weight=weight, num_microbatches=1, dp_cp_size=1)
    assert schedule(scale, [[(0.0, 0)]]) == 0.0


def test_the_gradient_passes_through_the_scale() -> None:
    # d(factor * x)/dx with factor 3 * 2 / 4 = 1.5.
    value = torch.tensor(2.0, requires_grad=True)
    scale = LossScale(per_token=False, total_weight=4.0, num_microbatches=3, dp_cp_size=2)
    scale.for_megatron(value, torch.tensor(1))[0].backward()
    assert value.grad is not None and float(value.grad) == 1.5


@pytest.mark.parametrize("per_token", [True, False])
def test_the_gradient_that_comes_back_is_known_before_the_step(per_token: bool) -> None:
    scale = LossScale(per_token, total_weight=5.0, num_microbatches=3, dp_cp_size=2)
    weighted = torch.tensor(0.7, requires_grad=True)
    loss, _ = scale.for_megatron(weighted, torch.tensor(4))
    (loss if per_token else loss / 3).backward()  # as the schedule divides it
    # per sample: 3 * 2 / 5 / 3 = 0.4
    assert float(weighted.grad or 0.0) == pytest.approx(scale.gradient_of_weighted_sum)
    assert scale.gradient_of_weighted_sum == (1.0 if per_token else 0.4)
    scaled = replace(scale, loss_scale=1024.0)  # what float16 multiplies the loss by comes back too
    assert scaled.gradient_of_weighted_sum == 1024.0 * scale.gradient_of_weighted_sum
