"""Losses that weight by the rollout policy, by hand: dppo_kl, ipo_tv, vespo, topr, dro, minpro."""

from __future__ import annotations

import math

import pytest
import torch

from plugin.config import LossConfig
from plugin.ppo_utils.importance_ratio import binary_kl
from tests.unit.loss.sample_batches import logs, token_loss


def close(actual: torch.Tensor, *expected: float) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_binary_kl_by_hand() -> None:
    # 0.5 ln(0.5 / 0.9) + 0.5 ln(0.5 / 0.1) = 0.5108; the same coin: 0; masked: 0 whatever is there
    found = binary_kl(
        logs(0.5, 0.3, 0.5), torch.tensor([math.log(0.9), math.log(0.3), math.nan]),
        torch.tensor([True, True, False]),
    )  # fmt: skip
    close(found, 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1), 0.0, 0.0)


def test_binary_kl_of_certainties_is_finite() -> None:
    # p = 1 against q = 0.5 with an edge of 1e-6: about ln 2; p = 0.5 against 1: 0.5 ln 0.5 + 0.5 ln(0.5 / 1e-6)
    everything = torch.ones(3, dtype=torch.bool)
    certain = torch.tensor([0.0, math.log(0.5), -1e4])
    found = binary_kl(certain, torch.tensor([math.log(0.5), 0.0, 0.0]), everything)
    assert found[0] == pytest.approx(math.log(2), abs=2e-5)
    assert found[1] == pytest.approx(0.5 * math.log(0.5) + 0.5 * math.log(0.5 / 1e-6), rel=1e-4)
    assert bool(found.isfinite().all())


def test_dppo_kl_drops_only_in_the_direction_in_which_the_advantage_pushes() -> None:
    # 0.5 -> 0.9: D = 0.511 > 0.05. A > 0 and risen: dropped; A < 0 and risen: kept, -A r = 1.8
    # 0.5 -> 0.1: D = 0.511. A < 0 and fallen: dropped; A > 0 and fallen: kept, -A r = -0.2
    # 0.001 -> 0.01, a ratio of 10: D = 0.0067 is small, kept
    result = token_loss(
        LossConfig(policy_loss="dppo_kl"),
        cur=[logs(0.9, 0.9, 0.1, 0.1, 0.01)],
        rollout_log_probs=[logs(0.5, 0.5, 0.5, 0.5, 0.001)],
        advantages=[torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0])],
    )
    close(result.loss, 0.0, 1.8, 0.0, -0.2, -10.0)
    close(result.gradient, 0.0, 1.8, 0.0, -0.2, -10.0)
    assert result.kept == [False, True, False, True, True]
    assert result.metric("is_masked_high") == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert result.metric("is_masked_low") == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_dppo_kl_caps_the_ratio_of_a_kept_token() -> None:
    result = token_loss(
        LossConfig(policy_loss="dppo_kl", dppo_ratio_cap=3.0),
        cur=[logs(0.01)],
        rollout_log_probs=[logs(0.001)],
        advantages=[torch.ones(1)],
    )
    close(result.loss, -3.0)
    close(result.gradient, 0.0)


def test_vespo_weights_a_sequence_by_its_gamma_shaped_kernel() -> None:
    # w = 2 * 0.25 = 0.5 for both tokens: A >= 0: e^3 0.25 e^-1.5 = 0.25 e^1.5 = 1.12042
    #   A < 0: e^2 0.125 e^-1 = 0.125 e = 0.339785. The masked third token (ratio 1e6) does not count.
    cur = torch.tensor([math.log(0.4), math.log(0.05), -1.0])
    result = token_loss(
        LossConfig(policy_loss="vespo"),
        cur=[cur],
        rollout_log_probs=[torch.tensor([math.log(0.2), math.log(0.2), -15.0])],
        advantages=[torch.tensor([1.0, -1.0, 1.0])],
        masks=[torch.tensor([1, 1, 0])],
    )
    up, down = 0.25 * math.exp(1.5), 0.125 * math.e
    close(result.gradient, -up, down, 0.0)
    close(result.loss, -up * math.log(0.4), down * math.log(0.05), 0.0)
    close(torch.tensor(result.metric("vespo/phi")), up, down, 0.0)


def test_vespo_is_one_on_policy_and_vanishes_far_from_it() -> None:
    def phi(ratio: float, advantage: float) -> float:
        result = token_loss(
            LossConfig(policy_loss="vespo"),
            cur=[torch.tensor([-50.0])],
            rollout_log_probs=[torch.tensor([-50.0 - math.log(ratio)])],
            advantages=[torch.tensor([advantage])],
        )
        return abs(result.gradient.item())

    assert phi(1.0, 1.0) == pytest.approx(1.0) and phi(1.0, -1.0) == pytest.approx(1.0)
    # a ratio of e^40 is bounded to e^20 before it is multiplied by lambda, one of e^-40 to 1e-8
    assert phi(math.exp(40), 1.0) < 1e-8 and phi(math.exp(40), -1.0) < 1e-8
    assert phi(math.exp(-40), 1.0) == pytest.approx(math.exp(3) * 1e-16, rel=1e-3, abs=3e-9)


def test_topr_tapers_only_what_it_pushes_down() -> None:
    # sequence ratios 0.5 * 0.5 = 0.25 and 2 * 2 = 4
    # A = 1: weight 1 in both; A = -1: 0.25, and min(4, 1) = 1
    result = token_loss(
        LossConfig(policy_loss="topr"),
        cur=[logs(0.1, 0.1), logs(0.4, 0.4)],
        rollout_log_probs=[logs(0.2, 0.2), logs(0.2, 0.2)],
        advantages=[torch.tensor([1.0, -1.0]), torch.tensor([1.0, -1.0])],
    )
    close(result.gradient, -1.0, 0.25, -1.0, 1.0)
    assert result.metric("pg_clipfrac") == [0.0, 0.0, 0.0, 1.0]
    assert result.outputs.policy.weight is not None
    close(result.outputs.policy.weight, 1.0, 0.25, 1.0, 1.0)


def test_dro_pulls_back_to_the_rollout_policy() -> None:
    # beta 0.5: -(A cur - 0.25 (cur - rollout)^2); cur -1, rollout -3, A 2: 2 + 0.25 * 4 = 3, gradient -2 + 0.5 * 2 = -1
    result = token_loss(
        LossConfig(policy_loss="dro", dro_beta=0.5),
        cur=[torch.tensor([-1.0])],
        rollout_log_probs=[torch.tensor([-3.0])],
        advantages=[torch.tensor([2.0])],
    )
    close(result.loss, 3.0)
    close(result.gradient, -1.0)


def test_minpro_multiplies_with_the_smallest_ratio_before_the_token() -> None:
    # ratios 0.5, 2, 1, 0.25 | 2: prefix minima -, 0.5, 0.5, 0.5 | -: weights 0.5, 1, 0.5, 0.125 | 2 -> capped at 1.2
    result = token_loss(
        LossConfig(policy_loss="minpro"),
        cur=[logs(0.1, 0.4, 0.2, 0.05), logs(0.4)],
        rollout_log_probs=[logs(0.2, 0.2, 0.2, 0.2), logs(0.2)],
        advantages=[torch.ones(4), torch.ones(1)],
    )
    close(result.gradient, -0.5, -1.0, -0.5, -0.125, -1.2)
    assert result.metric("pg_clipfrac") == [0.0, 0.0, 0.0, 0.0, 1.0]


def test_minpro_does_not_look_at_masked_tokens() -> None:
    # the masked first token has ratio 0.01: the second is the first that counts
    result = token_loss(
        LossConfig(policy_loss="minpro"),
        cur=[logs(0.002, 0.1, 0.2)],
        rollout_log_probs=[logs(0.2, 0.2, 0.2)],
        advantages=[torch.ones(3)],
        masks=[torch.tensor([0, 1, 1])],
    )
    close(result.gradient, 0.0, -0.5, -0.5)


@pytest.mark.parametrize("loss", ["dppo_kl", "vespo", "topr", "dro", "minpro"])
def test_extreme_but_finite_log_probs_give_finite_losses_and_gradients(loss: str) -> None:
    extremes = torch.tensor([-79.0, -1e-8, 0.0, -79.5])
    result = token_loss(
        LossConfig(policy_loss=loss),
        cur=[extremes],
        rollout_log_probs=[extremes.flip(0)],
        advantages=[torch.tensor([1.0, -1.0, 1.0, -1.0])],
    )
    assert bool(result.loss.isfinite().all()) and bool(result.gradient.isfinite().all())


@pytest.mark.parametrize("loss", ["dppo_kl", "vespo", "topr", "dro", "minpro"])
def test_the_teacher_joins_the_advantage(loss: str) -> None:
    # A = 0 and teacher - cur = 2 at ratio 1: the gradient is -0.25 * 2
    result = token_loss(
        LossConfig(policy_loss=loss, teacher_tau=0.25),
        cur=[torch.tensor([-3.0])],
        rollout_log_probs=[torch.tensor([-3.0])],
        teacher_log_probs=[torch.tensor([-1.0])],
        advantages=[torch.zeros(1)],
    )
    close(result.gradient, -0.5)


def test_dppo_kl_has_a_bound_for_each_sign_of_the_advantage() -> None:
    # D is 0.511 for both; with 1.0 for A > 0 and 0.05 for A <= 0 only the second is dropped
    result = token_loss(
        LossConfig(policy_loss="dppo_kl", dppo_kl_threshold=1.0, dppo_kl_threshold_low=0.05),
        cur=[logs(0.9, 0.1)],
        rollout_log_probs=[logs(0.5, 0.5)],
        advantages=[torch.tensor([1.0, -1.0])],
    )
    assert result.kept == [True, False]
    close(result.loss, -1.8, 0.0)


def test_ipo_tv_drops_by_probability_and_pulls_every_token() -> None:
    # differences 0.1 (kept, at the edge), 0.2 (dropped), -0.2 (dropped whatever the sign of A)
    # 0.01 log(0.6 / 0.5)^2 = 0.000332; 0.01 log(0.7 / 0.5)^2 = 0.001132; 0.01 log(0.3 / 0.5)^2 = 0.002609
    result = token_loss(
        LossConfig(policy_loss="ipo_tv", kl_tau=0.01),
        cur=[logs(0.6, 0.7, 0.3)],
        rollout_log_probs=[logs(0.5, 0.5, 0.5)],
        advantages=[torch.tensor([2.0, -1.0, 1.0])],
    )
    assert result.kept == [True, False, False]
    close(result.loss, -2.4 + 0.000332, 0.001132, 0.002609)


def test_ipo_tv_is_dppo_tv_with_a_rollout_kl() -> None:
    """The loss that prime-rl's users know, by two routes."""
    inputs = {
        "cur": [logs(0.55, 0.7, 0.3)],
        "rollout_log_probs": [logs(0.5, 0.5, 0.35)],
        "advantages": [torch.tensor([2.0, -1.0, 1.0])],
    }
    direct = token_loss(LossConfig(policy_loss="ipo_tv", kl_tau=0.001), **inputs)
    composed = token_loss(
        LossConfig(
            policy_loss="dppo_tv",
            dppo_diff_low=0.1,
            dppo_diff_high=0.1,
            use_rollout_kl_loss=True,
            rollout_kl_loss_coef=0.002,
        ),
        **inputs,
    )
    torch.testing.assert_close(direct.outputs.total, composed.outputs.total)
