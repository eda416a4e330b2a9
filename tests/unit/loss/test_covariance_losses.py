"""clip_cov and kl_cov on hand-written tokens: value, gradient, what is dropped or pulled."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from plugin.config import LossConfig
from plugin.errors import ConfigError
from plugin.loss.hook_chain import batch_declarations
from plugin.loss.objective import check_loss
from tests.unit.loss.sample_batches import TokenResult, random_batch, run, token_loss

#: Means 0 and -2: covariances 2, 2, 0 and 0.
TRAIN, ADVANTAGES = torch.tensor([-1.0, -3.0, -2.0, -2.0]), torch.tensor([2.0, -2.0, 1.0, -1.0])


def loss_of(log_r: list[float], **flags: Any) -> TokenResult:
    return token_loss(
        LossConfig(**flags),
        cur=[TRAIN + torch.tensor(log_r)],
        log_probs=[TRAIN],
        advantages=[ADVANTAGES],
    )


def close(actual: torch.Tensor, *expected: float) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_clip_cov_drops_tokens_of_large_covariance() -> None:
    # 2 of 4 tokens wanted, 2 inside (1, 5): both go; the others are PPO's, -A at a ratio of 1
    result = loss_of([0.0] * 4, policy_loss="clip_cov", clip_cov_ratio=0.5)
    close(result.loss, 0.0, 0.0, -1.0, 1.0)
    close(result.gradient, 0.0, 0.0, -1.0, 1.0)
    assert result.kept == [False, False, True, True]
    assert result.metric("is_masked") == [1.0, 1.0, 0.0, 0.0]
    assert result.metric("covariance") == [2.0, 2.0, 0.0, 0.0]
    # ... and stay in the denominator
    assert result.outputs.denominator.tolist() == [True] * 4


def test_clip_cov_leaves_what_ppo_has_clipped_and_what_is_outside_the_band() -> None:
    # A = 2 at r = 1.5: clipped to 1.2, no gradient, and not dropped
    result = loss_of([math.log(1.5), 0.0, 0.0, 0.0], policy_loss="clip_cov", clip_cov_ratio=0.5)
    close(result.loss, -2.4, 0.0, -1.0, 1.0)
    assert result.kept == [True, False, True, True]
    outside = loss_of([0.0] * 4, policy_loss="clip_cov", clip_cov_ratio=0.5, clip_cov_low=2.0)
    close(outside.loss, -2.0, 2.0, -1.0, 1.0)
    assert all(outside.kept)


def test_kl_cov_pulls_the_tokens_of_largest_covariance_and_clips_none() -> None:
    # 1 of 4 wanted, two are equal: -r A + 0.5 |log r| on both, -r A elsewhere
    log_r = [0.1, -0.2, 0.5, -0.6]
    result = loss_of(log_r, policy_loss="kl_cov", kl_cov_ratio=0.25, kl_cov_coef=0.5)
    r = [math.exp(x) for x in log_r]
    a = ADVANTAGES.tolist()
    surrogate = [-ratio * advantage for ratio, advantage in zip(r, a, strict=True)]
    pull = [0.05, 0.1, 0.0, 0.0]
    close(result.loss, *(s + p for s, p in zip(surrogate, pull, strict=True)))
    slope = [0.5, -0.5, 0.0, 0.0]
    close(result.gradient, *(s + p for s, p in zip(surrogate, slope, strict=True)))
    assert result.metric("kl_cov_pulled") == [1.0, 1.0, 0.0, 0.0]
    assert all(result.kept) and result.metric("pg_clipfrac") == [0.0] * 4


def test_the_pull_of_kl_cov_has_no_gradient_on_the_first_update() -> None:
    pulled = loss_of([0.0] * 4, policy_loss="kl_cov", kl_cov_ratio=1.0, kl_cov_coef=100.0)
    close(pulled.gradient, -2.0, 2.0, -1.0, 1.0)


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_what_is_masked_counts_nowhere(loss: str) -> None:
    flags = {"clip_cov_ratio": 0.5} if loss == "clip_cov" else {"kl_cov_ratio": 0.25}
    config = LossConfig(policy_loss=loss, **flags)
    plain = token_loss(config, cur=[TRAIN + 0.1], log_probs=[TRAIN], advantages=[ADVANTAGES])
    garbage = torch.tensor([math.nan])
    spoiled = token_loss(
        config,
        cur=[torch.cat([TRAIN + 0.1, garbage])],
        log_probs=[torch.cat([TRAIN, -garbage])],
        advantages=[torch.cat([ADVANTAGES, torch.tensor([1e30])])],
        masks=[torch.tensor([1, 1, 1, 1, 0])],
    )
    torch.testing.assert_close(spoiled.loss[:4], plain.loss)
    torch.testing.assert_close(spoiled.gradient, torch.cat([plain.gradient, torch.zeros(1)]))


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_both_take_corrections_and_ask_for_the_trainers_log_probs_of_the_batch(loss: str) -> None:
    config = LossConfig(policy_loss=loss, use_tis=True, tis_clip=1.1)
    check_loss(config)
    assert list(batch_declarations(config)) == [loss]
    batch, logits = random_batch([[1, 0, 1], [1, 1]])
    _, gradient, metrics = run(config, batch, logits)
    assert gradient.any() and "tis" in metrics
    with pytest.raises(ConfigError, match=f"{loss} needs the trainer's log-probs of the whole"):
        check_loss(LossConfig(policy_loss=loss, train_log_probs="approximate"))
    with pytest.raises(ConfigError, match="selects tokens by their covariance over the batch"):
        LossConfig(policy_loss=loss, score_centering_topk=4)
    with pytest.raises(ConfigError, match="--clip-cov-low is 6"):
        LossConfig(policy_loss="clip_cov", clip_cov_low=6.0)
