"""Losses and estimators against verl's own functions on random batches, where verl is installed: values and gradients."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.adapters import verl as adapter
from plugin.config import LossConfig
from plugin.ppo_utils.advantages import (
    best_of_group_advantages,
    gdpo_advantages,
    maxrl_advantages,
    opo_advantages,
)
from tests.unit.adapters.test_verl_adapter import aggregate

CASES = 120


@pytest.fixture(scope="module")
def core_algos() -> Any:
    return pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed")


def random_tokens(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Old log-probs, advantages and mask [B, R], and how far the policy has moved, one number.

    All tokens have moved equally: verl takes covariances with the current log-probs, we with the old ones, and these
    are then the same.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (3 + seed % 4, 5 + seed % 7)
    mask = torch.rand(shape, generator=generator) < 0.8
    mask[0, 0] = True
    old = -3 * torch.rand(shape, generator=generator)
    advantages = 2 * torch.randn(shape, generator=generator)
    return old, advantages, mask, 0.8 * torch.rand(1, generator=generator) - 0.4


def verl_config(**policy_loss: Any) -> SimpleNamespace:
    return SimpleNamespace(
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.3,
        clip_ratio_c=3.0,
        global_batch_info={},
        policy_loss=SimpleNamespace(**policy_loss),
    )


LOSSES: dict[str, tuple[str, LossConfig, SimpleNamespace]] = {
    # Every token inside the band is dropped, so that verl's draw does not matter.
    "clip_cov": (
        "clip_cov",
        LossConfig(
            policy_loss="clip_cov",
            eps_clip_high=0.3,
            clip_cov_ratio=1.0,
            clip_cov_low=0.2,
            clip_cov_high=2.0,
        ),
        verl_config(clip_cov_ratio=1.0, clip_cov_lb=0.2, clip_cov_ub=2.0),
    ),
    "kl_cov": (
        "kl_cov",
        LossConfig(policy_loss="kl_cov", kl_cov_ratio=0.2, kl_cov_coef=0.7),
        verl_config(kl_cov_ratio=0.2, ppo_kl_coef=0.7),
    ),
}


@pytest.mark.filterwarnings("ignore:a loss or correction with a")
@pytest.mark.parametrize("name", LOSSES)
def test_losses_with_a_covariance_are_verls(core_algos: Any, name: str) -> None:
    theirs, config, namespace = LOSSES[name]
    affected = 0
    for seed in range(CASES):
        old, advantages, mask, moved = random_tokens(seed)
        cur = (old + moved).requires_grad_()
        call = {
            "old_log_prob": old,
            "log_prob": cur,
            "advantages": advantages,
            "response_mask": mask,
            "loss_agg_mode": "token-mean",
            "config": namespace,
        }
        expected, _ = core_algos.get_policy_loss_fn(theirs)(**call)
        found, metrics = adapter.policy_loss(config, aggregate)(**call)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        slopes = [torch.autograd.grad(loss, cur)[0] for loss in (found, expected)]
        torch.testing.assert_close(*slopes, rtol=1e-5, atol=1e-6)
        affected += 0 < metrics.get("actor/is_masked", metrics.get("actor/kl_cov_pulled")) < 1
    assert affected > CASES / 2


def test_gmpo_is_verls_geo_mean(core_algos: Any) -> None:
    config = LossConfig(policy_loss="gmpo", eps_clip=0.2, eps_clip_high=0.3)
    for seed in range(CASES):
        old, advantages, mask, _ = random_tokens(seed)
        # verl takes the mean of a sequence's advantages, which here are equal.
        advantages = advantages[:, :1].expand_as(advantages).clone()
        mask[:, 0] = True
        cur = (old + 0.3 * torch.randn_like(old)).requires_grad_()
        call = {
            "old_log_prob": old,
            "log_prob": cur,
            "advantages": advantages,
            "response_mask": mask,
        }
        expected, _ = core_algos.get_policy_loss_fn("geo_mean")(
            **call, loss_agg_mode="seq-mean-token-mean", config=verl_config()
        )
        found, _ = adapter.policy_loss(config, mean_of_means)(
            **call, loss_agg_mode="token-mean", config=verl_config()
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        slopes = [torch.autograd.grad(loss, cur)[0] for loss in (found, expected)]
        torch.testing.assert_close(*slopes, rtol=1e-5, atol=1e-6)


def mean_of_means(loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str, **_: Any) -> Tensor:
    assert loss_agg_mode == "token-mean"
    return ((loss_mat * loss_mask).sum(1) / loss_mask.sum(1)).mean()


def random_groups(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two rewards of every response [N, 2], groups [N], and lengths of the responses."""
    generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)
    sizes = [draw.randint(2, 5) for _ in range(draw.randint(2, 4))]
    groups = torch.cat([torch.full((n,), 7 * i) for i, n in enumerate(sizes)])
    correct = (torch.rand(len(groups), generator=generator) < 0.5).float()
    graded = 10 * torch.rand(len(groups), generator=generator)
    return torch.stack([correct, graded], 1), groups, torch.randint(1, 9, (len(groups),), generator=generator)  # fmt: skip


def verls(function: Callable[..., Any], rewards: Tensor, groups: Tensor, lengths: Tensor, **more: Any) -> Tensor:  # fmt: skip
    """The advantage of every response: rewards at the last token, as verl holds them."""
    mask = (torch.arange(8) < lengths[:, None]).float()
    tokens = torch.zeros_like(mask)
    tokens[torch.arange(len(rewards)), lengths - 1] = rewards
    advantages, _ = function(
        token_level_rewards=tokens, response_mask=mask, index=groups.numpy().astype(str), **more
    )
    return advantages[:, 0]


def test_group_estimators_are_verls(core_algos: Any) -> None:
    for seed in range(CASES):
        rewards, groups, lengths = random_groups(seed)
        graded = rewards[:, 1]
        for mine, theirs, more in (
            (
                best_of_group_advantages(graded, groups),
                core_algos.compute_grpo_passk_outcome_advantage,
                {"config": {"norm_adv_by_std_in_grpo": True}},
            ),
            (
                opo_advantages(graded, groups, lengths),
                core_algos.compute_opo_outcome_advantage,
                {},
            ),
        ):
            expected = verls(theirs, graded, groups, lengths, **more)
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def test_gdpo_is_verls_but_for_whitening_over_responses(core_algos: Any) -> None:
    theirs = getattr(core_algos, "compute_gdpo_outcome_advantage", None)
    if theirs is None:
        pytest.skip("this verl has no GDPO")
    for seed in range(CASES):
        rewards, groups, _ = random_groups(seed)
        count = len(rewards)
        mask = torch.ones(count, 8)
        expected, _ = theirs(
            token_level_rewards=torch.zeros(count, 8),
            response_mask=mask,
            index=groups.numpy().astype(str),
            config={"gdpo_reward_keys": ["correct", "graded"], "gdpo_reward_weights": [1.0, 0.5]},
            non_tensor_batch={
                "correct": rewards[:, 0].numpy(),
                "graded": rewards[:, 1].numpy(),
            },
            batch={
                "prompts": torch.zeros(count, 2),
                "attention_mask": torch.ones(count, 10, dtype=torch.int64),
            },
        )
        # verl whitens over tokens, 8 equal ones of each response: its unbiased deviation is of 8 N numbers.
        scale = math.sqrt((count - 1) / count * (8 * count) / (8 * count - 1))
        mine = gdpo_advantages(rewards, groups, [1.0, 0.5])
        torch.testing.assert_close(mine, expected[:, 0] * scale, rtol=1e-3, atol=1e-3)


def test_maxrl_is_grpo_times_deviation_over_mean(core_algos: Any) -> None:
    # verl has no MaxRL: against its GRPO without deviation, divided by the group's mean
    for seed in range(CASES):
        rewards, groups, lengths = random_groups(seed)
        graded = rewards[:, 1]
        centered = verls(
            core_algos.compute_grpo_outcome_advantage,
            graded,
            groups,
            lengths,
            norm_adv_by_std_in_grpo=False,
        )
        mine = maxrl_advantages(graded, groups)
        torch.testing.assert_close(mine, centered / (graded - centered), rtol=1e-3, atol=1e-4)
