"""Every policy loss on hand-written tokens: value, gradient, what is kept, what is reported."""

import math

import pytest
import torch

from plugin.config import LossConfig
from tests.unit.loss.sample_batches import logs, token_loss

ONES = [torch.ones(1)]


def close(actual: torch.Tensor, *expected: float) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_ppo_clips_by_hand() -> None:
    # r = cur / train, clip to [0.8, 1.2]:
    #   A = 1:  max(-0.5, -0.8) = -0.5; max(-1.1, -1.1) = -1.1; max(-1.5, -1.2) = -1.2
    #   A = -1: max(0.5, 0.8) = 0.8; max(1.1, 1.1) = 1.1; max(1.5, 1.2) = 1.5
    # gradient -A r where the unclipped branch is the maximum, else 0
    result = token_loss(
        LossConfig(),
        cur=[logs(0.5, 1.1, 1.5, 0.5, 1.1, 1.5)],
        log_probs=[torch.zeros(6)],
        advantages=[torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])],
    )
    close(result.loss, -0.5, -1.1, -1.2, 0.8, 1.1, 1.5)
    close(result.gradient, -0.5, -1.1, 0.0, 0.0, 1.1, 1.5)
    assert result.metric("pg_clipfrac") == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert all(result.kept)


def test_ppo_has_its_own_upper_clip() -> None:
    # 1 + 0.5: r = 1.4 is inside, 1.6 clipped to 1.5
    result = token_loss(
        LossConfig(eps_clip_high=0.5),
        cur=[logs(1.4, 1.6)],
        log_probs=[torch.zeros(2)],
        advantages=[torch.ones(2)],
    )
    close(result.loss, -1.4, -1.5)
    close(result.gradient, -1.4, 0.0)


def test_dual_clip_bounds_the_loss_of_negative_advantages_only() -> None:
    # c = 3: A = -1, r = 4 -> min(4, 3) = 3, gradient 0; r = 2 -> 2; A = 1, r = 4 -> -1.2 as without
    result = token_loss(
        LossConfig(eps_clip_c=3.0),
        cur=[logs(4.0, 2.0, 4.0)],
        log_probs=[torch.zeros(3)],
        advantages=[torch.tensor([-1.0, -1.0, 1.0])],
    )
    close(result.loss, 3.0, 2.0, -1.2)
    close(result.gradient, 0.0, 2.0, 0.0)


def test_ppo_without_train_log_probs_is_on_policy() -> None:
    result = token_loss(LossConfig(), cur=[logs(0.3)], advantages=[torch.tensor([2.0])])
    close(result.loss, -2.0)  # ratio 1
    close(result.gradient, -2.0)


def test_reinforce_is_minus_advantage_times_log_prob() -> None:
    result = token_loss(
        LossConfig(policy_loss="reinforce"),
        cur=[torch.tensor([-0.5, -2.0])],
        log_probs=[torch.zeros(2)],
        advantages=[torch.tensor([3.0, -1.0])],
    )
    close(result.loss, 1.5, -2.0)  # -3 * -0.5, 1 * -2
    close(result.gradient, -3.0, 1.0)


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    # weights clip(0.5, 1.1, 1.5) = 0.8, 1.1, 1.2; loss -w A cur; gradient -w A
    cur = logs(0.5, 1.1, 1.5)
    result = token_loss(
        LossConfig(policy_loss="cispo"),
        cur=[cur],
        log_probs=[torch.zeros(3)],
        advantages=[torch.tensor([1.0, 2.0, -1.0])],
    )
    a, b, c = cur.tolist()
    close(result.loss, -0.8 * a, -2.2 * b, 1.2 * c)
    close(result.gradient, -0.8, -2.2, 1.2)
    assert result.metric("pg_clipfrac") == [1.0, 0.0, 1.0]


def test_gspo_clips_the_geometric_mean_ratio_of_the_sequence() -> None:
    # sample 0: mean(0.1, 0.3) = 0.2 over unmasked tokens, s = 1.22140 inside [0.5, 1.5]
    # sample 1: mean(0.6, 0.6) = 0.6, s = 1.82212 clipped to 1.5, so no gradient for A > 0
    result = token_loss(
        LossConfig(policy_loss="gspo", eps_clip=0.5),
        cur=[torch.tensor([0.1, 5.0, 0.3]), torch.tensor([0.6, 0.6])],
        log_probs=[torch.zeros(3), torch.zeros(2)],
        masks=[torch.tensor([1, 0, 1]), torch.tensor([1, 1])],
        advantages=[torch.full((3,), 2.0), torch.ones(2)],
    )
    s = math.exp(0.2)
    close(result.loss, -2 * s, 0.0, -2 * s, -1.5, -1.5)
    close(result.gradient, -2 * s, 0.0, -2 * s, 0.0, 0.0)
    assert result.metric("pg_clipfrac") == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_sapo_gates_softly_with_a_temperature_by_sign() -> None:
    # A = 2, tau 1, r = 1.5: sigmoid(0.5) = 0.62246 * 4 * 2 -> -4.97968
    # A = -1, tau 1.05, r = 1: sigmoid(0) = 0.5 * 4 / 1.05 -> 1.90476
    # d/dcur: -A 4 s (1 - s) r: -2 * 4 * 0.62246 * 0.37754 * 1.5 = -2.82005; 4 * 0.25 = 1
    result = token_loss(
        LossConfig(policy_loss="sapo"),
        cur=[logs(1.5, 1.0)],
        log_probs=[torch.zeros(2)],
        advantages=[torch.tensor([2.0, -1.0])],
    )
    close(result.loss, -4.979675, 1.904762)
    close(result.gradient, -2.820046, 1.0)


def test_icepop_keeps_a_ratio_band_with_inclusive_edges_and_drops_the_rest() -> None:
    # band [0.2, 5]: 0.19 low, edges kept, 5.1 high; loss -A r
    result = token_loss(
        LossConfig(policy_loss="icepop"),
        cur=[logs(0.19, 0.2, 1.0, 5.0, 5.1)],
        rollout_log_probs=[torch.zeros(5)],
        advantages=[torch.tensor([1.0, 1.0, -2.0, 1.0, 1.0])],
    )
    close(result.loss, 0.0, -0.2, 2.0, -5.0, 0.0)
    close(result.gradient, 0.0, -0.2, 2.0, -5.0, 0.0)
    assert result.kept == [False, True, True, True, False]
    assert result.metric("is_masked") == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert result.metric("is_masked_low") == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert result.metric("is_masked_high") == [0.0, 0.0, 0.0, 0.0, 1.0]


def test_adv_tau_scales_and_the_teacher_pulls_without_gradient() -> None:
    # A := 0.5 * 2 + 0.1 * (teacher - cur) = 1 + 0.1 * (0 + log 2) = 1.0693147; r = 0.5; loss -A r
    # gradient -A r too: the teacher term is constant
    result = token_loss(
        LossConfig(policy_loss="icepop", adv_tau=0.5, teacher_tau=0.1),
        cur=[logs(0.5)],
        rollout_log_probs=[torch.zeros(1)],
        teacher_log_probs=[torch.zeros(1)],
        advantages=[torch.tensor([2.0])],
    )
    close(result.loss, -0.53465736)
    close(result.gradient, -0.53465736)
    # teacher_kl = cur - teacher = -log 2
    assert result.metric("teacher_kl") == pytest.approx([-math.log(2)])


def test_dppo_tv_keeps_by_probability_difference_whatever_the_sign_of_the_advantage() -> None:
    # differences: 0.2 edge, 0.21 high, -0.2 edge, -0.21 low; ratios 1.4, 1.42, 0.6, 0.58
    result = token_loss(
        LossConfig(policy_loss="dppo_tv"),
        cur=[logs(0.7, 0.71, 0.3, 0.29)],
        rollout_log_probs=[logs(0.5, 0.5, 0.5, 0.5)],
        advantages=[torch.tensor([1.0, -1.0, -1.0, 1.0])],
    )
    close(result.loss, -1.4, 0.0, 0.6, 0.0)
    close(result.gradient, -1.4, 0.0, 0.6, 0.0)
    assert result.metric("is_masked_high") == [0.0, 1.0, 0.0, 0.0]
    assert result.metric("is_masked_low") == [0.0, 0.0, 0.0, 1.0]


def test_the_ratio_of_a_rare_token_can_be_capped_in_dppo_tv() -> None:
    # 0.1 against 0.001: the difference 0.099 is inside, the ratio is 100
    tokens = {
        "cur": [logs(0.1)],
        "rollout_log_probs": [logs(0.001)],
        "advantages": ONES,
    }
    close(token_loss(LossConfig(policy_loss="dppo_tv"), **tokens).loss, -100.0)  # type: ignore[arg-type]
    capped = token_loss(LossConfig(policy_loss="dppo_tv", dppo_ratio_cap=5.0), **tokens)  # type: ignore[arg-type]
    close(capped.loss, -5.0)
    close(capped.gradient, 0.0)


def test_dppo_drops_by_the_sign_of_the_advantage_and_penalizes_all_tokens() -> None:
    # differences +0.3, +0.3, -0.3, -0.3 with A = 1, -1, 1, -1: dropped are the first and the last
    # r = 1.6, 1.6, 0.4, 0.4; l = log r; loss = -keep A r + 0.1 l^2
    result = token_loss(
        LossConfig(policy_loss="dppo", kl_tau=0.1),
        cur=[logs(0.8, 0.8, 0.2, 0.2)],
        rollout_log_probs=[logs(0.5, 0.5, 0.5, 0.5)],
        advantages=[torch.tensor([1.0, -1.0, 1.0, -1.0])],
    )
    up, down = math.log(1.6), math.log(0.4)
    close(result.loss, 0.1 * up**2, 1.6 + 0.1 * up**2, -0.4 + 0.1 * down**2, 0.1 * down**2)
    close(result.gradient, 0.2 * up, 1.6 + 0.2 * up, -0.4 + 0.2 * down, 0.2 * down)
    assert result.kept == [False, True, True, False]
    assert result.metric("is_masked_high") == [1.0, 0.0, 0.0, 0.0]
    assert result.metric("is_masked_low") == [0.0, 0.0, 0.0, 1.0]


def test_dppo_treats_an_advantage_of_zero_as_not_positive() -> None:
    result = token_loss(
        LossConfig(policy_loss="dppo"),
        cur=[logs(0.8, 0.2)],
        rollout_log_probs=[logs(0.5, 0.5)],
        advantages=[torch.zeros(2)],
    )
    assert result.kept == [True, False]


def test_ipo_kl_penalizes_kept_tokens_only() -> None:
    # band [0.2, 5]: r = 2 kept, r = 6 dropped together with its penalty
    result = token_loss(
        LossConfig(policy_loss="ipo_kl", kl_tau=0.1),
        cur=[logs(2.0, 6.0)],
        rollout_log_probs=[torch.zeros(2)],
        advantages=[torch.tensor([1.0, 1.0])],
    )
    close(result.loss, -2.0 + 0.1 * math.log(2) ** 2, 0.0)
    close(result.gradient, -2.0 + 0.2 * math.log(2), 0.0)
    assert result.kept == [True, False]


def test_a_dropped_token_with_a_huge_ratio_leaves_no_trace() -> None:
    # log-ratio 1000: exp is inf, and 0 * inf would be a NaN gradient. A GPU does not check values by default.
    for name in ("icepop", "ipo_kl", "dppo_tv"):
        result = token_loss(
            LossConfig(policy_loss=name, validate_batch="never"),
            cur=[torch.tensor([-1.0])],
            rollout_log_probs=[torch.tensor([-1001.0])],
            advantages=ONES,
        )
        assert result.loss.tolist() == [0.0] and result.gradient.tolist() == [0.0]


def test_comparison_metrics_by_hand() -> None:
    # cur -1, train -1.5, rollout -2: ppo_kl = train - cur = -0.5; ois = e^0.5;
    # |train - rollout| = 0.5; mismatch_kl = e^1 - 1 - 1 = 0.71828
    result = token_loss(
        LossConfig(),
        cur=[torch.tensor([-1.0, -1.0])],
        log_probs=[torch.tensor([-1.5, -1.0])],
        rollout_log_probs=[torch.tensor([-2.0, -1.0])],
        advantages=[torch.ones(2)],
    )
    assert result.metric("ppo_kl") == pytest.approx([-0.5, 0.0])
    assert result.metric("ois") == pytest.approx([math.exp(0.5), 1.0])
    assert result.metric("train_rollout_logprob_abs_diff") == pytest.approx([0.5, 0.0])
    assert result.metric("mismatch_kl") == pytest.approx([math.e - 2, 0.0])


def test_mismatch_kl_is_reported_for_kept_and_dropped_tokens_apart() -> None:
    # r = 6 is dropped: 6 - 1 - log 6; r = 2 kept: 2 - 1 - log 2
    result = token_loss(
        LossConfig(policy_loss="icepop"),
        cur=[logs(6.0, 2.0)],
        rollout_log_probs=[torch.zeros(2)],
        advantages=[torch.ones(2)],
    )
    assert result.metric("masked_mismatch_kl") == pytest.approx([5 - math.log(6), 0.0])
    assert result.metric("unmasked_mismatch_kl") == pytest.approx([0.0, 1 - math.log(2)])
    assert result.outputs.metrics["masked_mismatch_kl"].over.tolist() == [True, False]
    assert result.outputs.metrics["unmasked_mismatch_kl"].over.tolist() == [False, True]


def test_gmpo_is_the_geometric_mean_of_ratios_clipped_on_one_side() -> None:
    # A > 0: log 2 is clipped to 0.4, log 0.5 stays: mean (0.4 - 0.693147) / 2, exp = 0.863662
    # A < 0: log 2 stays, log 0.5 is raised to -0.4: mean (0.693147 - 0.4) / 2, exp = 1.157860
    result = token_loss(
        LossConfig(policy_loss="gmpo", eps_clip=0.4),
        cur=[logs(0.4, 0.1), logs(0.4, 0.1)],
        log_probs=[logs(0.2, 0.2), logs(0.2, 0.2)],
        advantages=[torch.ones(2), -torch.ones(2)],
    )
    torch.testing.assert_close(
        result.loss, torch.tensor([-0.863662, -0.863662, 1.157860, 1.157860])
    )
    # only what is not clipped has a gradient, the geometric mean times A
    torch.testing.assert_close(result.gradient, torch.tensor([0.0, -0.863662, 1.157860, 0.0]))
    assert result.metric("pg_clipfrac") == [1, 0, 0, 1]
