"""--train-log-probs approximate: the old policy between the engine's and the current one, by weight version."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.config import JobConfig, LossConfig
from plugin.errors import ConfigError
from plugin.loss.inputs import loss_inputs
from plugin.loss.objective import compute_loss

APPROXIMATE = LossConfig(train_log_probs="approximate")


def batch_of(versions: Any, current: float, **changes: Any) -> dict[str, Any]:
    """Two samples of 2 tokens and 1 token; the trainer's version before the first update is 5."""
    return {
        "total_lengths": [3, 2],
        "response_lengths": [2, 1],
        "loss_masks": [torch.tensor([1, 1]), torch.tensor([1])],
        "advantages": [torch.tensor([1.0, -2.0]), torch.tensor([0.5])],
        "rollout_log_probs": [torch.tensor([-1.0, -3.0]), torch.tensor([-2.0])],
        "weight_versions": versions,
        "trainer_version": 5,
        "current_version": current,
        **changes,
    }


CUR = torch.tensor([-2.0, -2.0, -1.0])


def old(batch: dict[str, Any], cur: Tensor = CUR, config: LossConfig = APPROXIMATE) -> Tensor:
    return loss_inputs(config, batch, cur).proximal_log_probs


def test_the_old_policy_lies_between_rollout_and_current_by_version() -> None:
    # v_cur = 5.5. Sample 0 of version 4: alpha = (5 - 4) / (5.5 - 4) = 2/3
    #   -1 + 2/3 (-2 + 1) = -1.6667; -3 + 2/3 (-2 + 3) = -2.3333
    # Sample 1 of version 5: alpha = 0, the engine's own -2
    expected = torch.tensor([-5 / 3, -7 / 3, -2.0])
    torch.testing.assert_close(old(batch_of([4, 5], 5.5)), expected)
    per_token = [torch.tensor([4, 4]), torch.tensor([5])]
    torch.testing.assert_close(old(batch_of(per_token, 5.5)), expected)
    # versions of one response that changed on the way: alpha 2/3, then 3 / 3.5
    mixed = [torch.tensor([4, 2]), torch.tensor([5])]
    torch.testing.assert_close(old(batch_of(mixed, 5.5))[1], torch.tensor(-3 + 6 / 7))


def test_before_the_first_update_the_old_policy_is_the_current_one() -> None:
    assert torch.equal(old(batch_of([4, 5], 5.0)), CUR)
    # an engine that is ahead of the trainer's count is not extrapolated
    torch.testing.assert_close(old(batch_of([7, 5], 5.5))[:2], torch.tensor([-1.0, -3.0]))


def test_the_gradient_does_not_flow_through_the_approximated_old_policy() -> None:
    cur = CUR.clone().requires_grad_()
    config = LossConfig(train_log_probs="approximate", eps_clip=5.0)
    compute_loss(config, loss_inputs(config, batch_of([4, 5], 5.5), cur)).total.sum().backward()
    # -A exp(cur - old): cur - old = -1/3, 1/3, 1
    advantages = torch.tensor([1.0, -2.0, 0.5])
    ratios = torch.tensor([-1 / 3, 1 / 3, 1.0]).exp()
    torch.testing.assert_close(cur.grad, -advantages * ratios)


def test_tis_on_the_approximated_policy_is_the_decoupled_weight_of_the_paper() -> None:
    config = LossConfig(train_log_probs="approximate", use_tis=True, tis_clip=10.0)
    inputs = loss_inputs(config, batch_of([4, 5], 5.5), CUR)
    weights = compute_loss(config, inputs).metrics["tis"]
    # old / rollout: exp(-2/3), exp(2/3), 1
    torch.testing.assert_close(weights.values, torch.tensor([-2 / 3, 2 / 3, 0.0]).exp())


def test_opsm_with_the_engines_log_probs_as_the_old_ones_compares_with_the_engine() -> None:
    # mean(rollout - cur): (1 - 1) / 2 = 0 for the first sample; with cur -4 and -4: (3 + 1) / 2 = 2
    config = LossConfig(
        use_rollout_logprobs=True,
        use_tis=True,
        custom_tis_function_path="plugin.ppo_utils.opsm_function",
        opsm_delta=1.0,
    )
    cur = torch.tensor([-4.0, -4.0, -1.0])
    batch = batch_of([5, 5], 5.0)  # advantages 1, -2: the mean is negative
    for values, dropped in ((CUR, [0.0, 0.0, 0.0]), (cur, [1.0, 1.0, 0.0])):
        outputs = compute_loss(config, loss_inputs(config, batch, values))
        assert outputs.metrics["opsm_clipfrac"].values.tolist() == dropped


def test_garbage_on_a_masked_token_changes_nothing() -> None:
    masks = [torch.tensor([1, 0]), torch.tensor([1])]
    spoiled = [torch.tensor([-1.0, -math.inf]), torch.tensor([-2.0])]
    clean = old(batch_of([4, 5], 5.5, loss_masks=masks))
    garbage = torch.tensor([-2.0, math.nan, -1.0])
    assert torch.equal(
        old(batch_of([4, 5], 5.5, loss_masks=masks, rollout_log_probs=spoiled), garbage), clean
    )


@pytest.mark.parametrize("name", ["weight_versions", "trainer_version", "current_version"])
def test_a_batch_without_versions_is_told_what_is_missing(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the batch has no {name}; .* recompute"):
        old(batch_of([4, 5], 5.5, **{name: None}))


def test_rollout_is_the_other_name_of_use_rollout_logprobs() -> None:
    batch = batch_of([4, 5], 5.5)
    for config in (LossConfig(train_log_probs="rollout"), LossConfig(use_rollout_logprobs=True)):
        assert old(batch, config=config).tolist() == [-1.0, -3.0, -2.0]
        assert config.train_log_probs == "rollout" and config.corrects_mismatch
    with pytest.raises(ConfigError, match="every weight is 1"):
        LossConfig(train_log_probs="rollout", use_tis=True)
    with pytest.raises(ConfigError, match="drop one of the two"):
        LossConfig(train_log_probs="approximate", use_rollout_logprobs=True)


def test_an_approximation_that_saves_nothing_or_lacks_its_routes_is_refused() -> None:
    with pytest.raises(ConfigError, match="no pass is saved"):
        JobConfig(train_log_probs="approximate")
    JobConfig(train_log_probs="approximate", num_updates_per_rollout=2)
    with pytest.raises(ConfigError, match="the log-prob pass that it saves"):
        JobConfig(
            train_log_probs="approximate",
            num_updates_per_rollout=2,
            use_routing_replay=True,
            embedded_model="qwen3_moe",
        )
    # It compares with the rollout policy only in part, and not at all before the first update.
    with pytest.raises(ConfigError, match="--use-tis"):
        JobConfig(train_log_probs="approximate", num_updates_per_rollout=2, async_rollouts=True)
