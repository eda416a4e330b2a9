"""--train-log-probs engine-version: the old policy is the trainer at the version that sampled each token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from plugin.config import JobConfig, LossConfig
from plugin.errors import BatchError, ConfigError
from plugin.loss.inputs import loss_inputs
from plugin.loss.objective import check_loss, compute_loss

CUR = torch.tensor([-2.0, -2.0, -1.0])
OF_VERSION, ROLLOUT = [-1.9, -2.3, -1.2], [-1.8, -2.4, -1.2]
SETTINGS: dict[str, Any] = {"train_log_probs": "engine-version", "use_tis": True, "tis_clip": 1.05}
ASYNC: dict[str, Any] = {"train_log_probs": "engine-version", "async_rollouts": True}


def batch_of(**changes: Any) -> dict[str, Any]:
    """Two samples of 2 tokens and 1 token."""
    return {
        "total_lengths": [3, 2],
        "response_lengths": [2, 1],
        "loss_masks": [torch.tensor([1, 1]), torch.tensor([1])],
        "advantages": [torch.tensor([1.0, -2.0]), torch.tensor([0.5])],
        "rollout_log_probs": list(torch.tensor(ROLLOUT).split([2, 1])),
        "proximal_log_probs": list(torch.tensor(OF_VERSION).split([2, 1])),
        **changes,
    }


def test_tis_sees_numerics_alone_and_the_ratio_staleness_alone() -> None:
    config = LossConfig(**SETTINGS, eps_clip=5.0)
    cur = CUR.clone().requires_grad_()
    outputs = compute_loss(config, loss_inputs(config, batch_of(), cur))
    outputs.total.sum().backward()
    # version / rollout: exp(-0.1), exp(0.1), 1, of which the second is clipped to 1.05
    tis = torch.tensor([-0.1, 0.1, 0.0]).exp()
    torch.testing.assert_close(outputs.metrics["tis"].values, tis)
    # cur / version: exp(-0.1), exp(0.3), exp(0.2); gradient -A w ratio
    weights = torch.tensor([math.exp(-0.1), 1.05, 1.0])
    ratios = torch.tensor([-0.1, 0.3, 0.2]).exp()
    advantages = torch.tensor([1.0, -2.0, 0.5])
    torch.testing.assert_close(cur.grad, -advantages * weights * ratios)
    torch.testing.assert_close(outputs.metrics["ois"].values, ratios)
    torch.testing.assert_close(outputs.metrics["ppo_kl"].values, torch.tensor([0.1, -0.3, -0.2]))
    off = outputs.metrics["train_rollout_logprob_abs_diff"].values
    torch.testing.assert_close(off, torch.tensor([0.1, 0.1, 0.0]))


def test_without_a_stale_token_it_is_recompute() -> None:
    columns = batch_of(proximal_log_probs=None, log_probs=batch_of()["proximal_log_probs"])
    found = [
        compute_loss(config, loss_inputs(config, columns, CUR)).total
        for config in (LossConfig(**SETTINGS), LossConfig(use_tis=True, tis_clip=1.05))
    ]
    assert torch.equal(*found)


def test_observed_mismatch_is_that_of_the_same_weights() -> None:
    config = LossConfig(train_log_probs="engine-version", get_mismatch_metrics=True)
    columns = batch_of(log_probs=list((CUR + 0.5).split([2, 1])))
    metrics = compute_loss(config, loss_inputs(config, columns, CUR)).metrics
    torch.testing.assert_close(metrics["tis"].values, torch.tensor([-0.1, 0.1, 0.0]).exp())


@pytest.mark.parametrize("garbage", [math.nan, -math.inf, 1e30])
def test_a_bad_value_is_an_error_where_it_counts_and_nothing_where_masked(garbage: float) -> None:
    config = LossConfig(**SETTINGS)
    masks = [torch.tensor([1, 0]), torch.tensor([1])]
    spoiled = [torch.tensor([OF_VERSION[0], garbage]), torch.tensor([OF_VERSION[2]])]
    clean = compute_loss(config, loss_inputs(config, batch_of(loss_masks=masks), CUR))
    again = batch_of(loss_masks=masks, proximal_log_probs=spoiled)
    assert torch.equal(compute_loss(config, loss_inputs(config, again, CUR)).total, clean.total)
    with pytest.raises(BatchError, match=r"proximal_log_probs is .* at sample 0, position 1"):
        loss_inputs(config, batch_of(proximal_log_probs=spoiled), CUR)


def test_corrections_that_look_at_the_whole_batch_first_go_with_it() -> None:
    hook = "plugin.ppo_utils.m2po_function"
    check_loss(LossConfig(**SETTINGS, custom_tis_function_path=hook))


@pytest.mark.parametrize("settings, message", [
    ({**ASYNC, "async_rollouts": False}, "rollouts are synchronous, so .* equals recompute"),
    ({**ASYNC, "max_weight_staleness": 0}, "--max-weight-staleness is 0, so no token"),
    ({**ASYNC, "partial_rollouts": True, "max_token_staleness": 0}, "--max-token-staleness is 0"),
    ({**ASYNC, "use_routing_replay": True, "embedded_model": "qwen3_moe"}, "--use-routing-replay"),
    ({**ASYNC, "policy_loss": "icepop"}, "nothing compares with these log-probs"),
    ({**ASYNC, "policy_loss": "reinforce", "use_tis": True}, "see the mismatch alone.*recompute"),
    ({**ASYNC, "score_centering_topk": 4}, "not known for tokens that were not sampled"),
])  # fmt: skip
def test_what_it_cannot_do_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig(**settings)


def test_so_many_versions_are_kept_as_the_oldest_token_is_behind() -> None:
    assert JobConfig().kept_weight_versions == 0
    assert JobConfig(**ASYNC).kept_weight_versions == 1
    assert JobConfig(**ASYNC, max_weight_staleness=4).kept_weight_versions == 4
    partial: dict[str, Any] = {"partial_rollouts": True, "max_token_staleness": 2}
    assert JobConfig(**ASYNC, max_weight_staleness=4, **partial).kept_weight_versions == 2
    # PPO's ratio corrects staleness by itself, and what is left of the mismatch is no refusal.
    assert JobConfig(**ASYNC).corrects_mismatch
