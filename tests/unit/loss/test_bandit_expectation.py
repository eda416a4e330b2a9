"""Which losses and corrections are unbiased: exact expectations on a softmax bandit.

Four actions, three different policies. The gradient of the true objective J = sum_a pi_cur(a) A(a) is known
exactly. Actions are sampled from the rollout policy, so the expected gradient of a loss is the sum over
all actions of pi_rollout(a) times its gradient on that action: nothing is sampled, nothing is estimated.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.config import LossConfig
from plugin.loss import POLICY_LOSSES, policy_loss_function
from plugin.vocabulary_ids import SamplerHead

CUR = torch.tensor([0.5, -0.3, 0.2, -0.6])
TRAIN = torch.tensor([0.1, 0.4, -0.2, 0.3])
ROLLOUT = torch.tensor([0.3, 0.1, -0.4, 0.6])
ADVANTAGES = torch.tensor([1.0, -0.5, 2.0, 0.3])

UNBOUNDED: dict[str, Any] = {
    "eps_clip": 1.0,
    "eps_clip_high": 1e6,
    "tis_clip": 1e6,
    "sequence_tis_clip": 1e6,
    "icepop_ratio_low": 0.0,
    "icepop_ratio_high": 1e6,
    "ipo_ratio_low": 0.0,
    "ipo_ratio_high": 1e6,
    "dppo_diff_low": 1.0,
    "dppo_diff_high": 1.0,
    "dppo_mask_low": 1.0,
    "dppo_mask_high": 1.0,
    "dppo_kl_threshold": 1e6,
    "ipo_threshold": 1.0,
    "m2po_threshold": 1e6,
    "kpop_threshold": 1e6,
    "kl_tau": 0.0,
}
HOOK = "plugin.ppo_utils."


def true_gradient(cur: Tensor) -> Tensor:
    # dJ/dtheta_k = sum_a pi(a) A(a) (1[a = k] - pi(k)) = pi(k) (A(k) - J)
    policy = cur.double().softmax(-1)
    return policy * (ADVANTAGES - (policy * ADVANTAGES).sum())


def expected_gradient(cur: Tensor, train: Tensor, rollout: Tensor, **flags: Any) -> Tensor:
    """-gradient of the expected loss: a batch with one sample per action, weighted by pi_rollout."""
    actions = range(len(cur))
    theta = cur.clone().requires_grad_()
    # one prompt token and one response token per sample: row 2a predicts action a
    logits = theta.expand(2 * len(cur), -1)[None]
    batch = {
        "unconcat_tokens": [torch.tensor([0, a]) for a in actions],
        "total_lengths": [2 for _ in actions],
        "response_lengths": [1 for _ in actions],
        "loss_masks": [torch.ones(1) for _ in actions],
        "advantages": list(ADVANTAGES.split(1)),
        "log_probs": list(train.log_softmax(-1).split(1)),
        "rollout_log_probs": list(rollout.log_softmax(-1).split(1)),
    }
    if topk := flags.get("score_centering_topk"):
        head = SamplerHead.of(rollout.log_softmax(-1)[None], topk)
        batch["rollout_topk_token_ids"] = [head.ids for _ in actions]
        batch["rollout_topk_log_probs"] = [head.log_probs for _ in actions]
    probabilities = rollout.softmax(-1)
    config = LossConfig(**{**UNBOUNDED, **flags})
    loss, _ = policy_loss_function(config, batch, logits, lambda x: (x * probabilities).sum())
    loss.backward()
    assert theta.grad is not None
    return -theta.grad.double()


def relative_error(gradient: Tensor, cur: Tensor = CUR) -> float:
    true = true_gradient(cur)
    return float((gradient - true).norm() / true.norm())


def correction(name: str | None) -> dict[str, Any]:
    if name is None:
        return {}
    return {"use_tis": True, "custom_tis_function_path": HOOK + name}


UNBIASED = [
    ("reinforce", "off_policy_is_function"),
    ("ppo", "vanilla_tis_function"),
    ("cispo", "vanilla_tis_function"),
    ("gspo", "vanilla_tis_function"),
    ("ppo", "icepop_function"),
    ("ppo", "sequence_tis_function"),
    ("ppo", "segment_tis_function"),
    ("ppo", "m2po_function"),
    ("ppo", "kpop_function"),
    ("icepop", None),
    ("dppo_tv", None),
    ("dppo", None),
    ("ipo_kl", None),
    ("dppo_kl", None),
    ("gmpo", "vanilla_tis_function"),  # with a clip of log r at 1 and 1e6, which nothing reaches
    ("ipo_tv", None),
    ("clip_cov", "vanilla_tis_function"),  # no covariance of the bandit is above 1: none is dropped
    ("minpro", None),  # of a single token there is no prefix
]


@pytest.mark.parametrize("base, hook", UNBIASED)
def test_unbiased_without_bounds(base: str, hook: str | None) -> None:
    gradient = expected_gradient(CUR, TRAIN, ROLLOUT, policy_loss=base, **correction(hook))
    assert relative_error(gradient) < 1e-5


@pytest.mark.parametrize("base", ["ppo", "cispo", "gspo"])
@pytest.mark.filterwarnings("ignore:.*counts pi_theta/pi_old twice")
def test_off_policy_is_counts_the_ratio_twice_on_a_base_that_carries_one(base: str) -> None:
    flags = correction("off_policy_is_function") | {"allow_biased_correction": True}
    gradient = expected_gradient(CUR, TRAIN, ROLLOUT, policy_loss=base, **flags)
    assert relative_error(gradient) > 0.3
    # ... and is right there for the first update on a rollout, when cur is still train
    first_update = expected_gradient(CUR, CUR, ROLLOUT, policy_loss=base, **flags)
    assert relative_error(first_update) < 1e-5


@pytest.mark.parametrize("base, hook", [
    ("reinforce", None),  # no correction at all
    ("ppo", None),  # corrects staleness, not the mismatch of train and rollout
    ("cispo", None),
    ("reinforce", "vanilla_tis_function"),  # corrects the mismatch, not staleness
])  # fmt: skip
def test_half_a_correction_is_biased(base: str, hook: str | None) -> None:
    gradient = expected_gradient(CUR, TRAIN, ROLLOUT, policy_loss=base, **correction(hook))
    assert relative_error(gradient) > 0.05


def expected_of(coefficients: Tensor) -> Tensor:
    """sum_a pi_rollout(a) c(a) grad log pi_cur(a): what a loss with gradient -c(a) per token expects."""
    policy, rollout = CUR.double().softmax(-1), ROLLOUT.double().softmax(-1)
    weighted = rollout * coefficients.double()
    return weighted - policy * weighted.sum()


def test_score_centering_leaves_the_covariance_under_the_sampler() -> None:
    # sum_a q(a) (A(a) - E_q[A]) grad log p(a): no drift, and still not the gradient under p
    a, q = ADVANTAGES.double(), ROLLOUT.double().softmax(-1)
    gradient = expected_gradient(
        CUR, TRAIN, ROLLOUT, policy_loss="reinforce", score_centering_topk=4
    )
    torch.testing.assert_close(gradient, expected_of(a - (q * a).sum()), rtol=1e-4, atol=1e-6)
    assert relative_error(gradient) > 0.05
    # With a weight that is not cut off nothing is left to center.
    centered = {
        "policy_loss": "reinforce",
        "score_centering_topk": 2,
        **correction("off_policy_is_function"),
    }
    assert relative_error(expected_gradient(CUR, TRAIN, ROLLOUT, **centered)) < 1e-5


def test_biased_losses_are_biased_exactly_as_their_formula_says() -> None:
    ratio = (CUR.double().log_softmax(-1) - ROLLOUT.double().log_softmax(-1)).exp()
    a = ADVANTAGES.double()
    coefficients = {
        # A >= 0 at full weight, A < 0 at min(r, 1)
        "topr": torch.where(a < 0, ratio.clamp(max=1.0), 1.0) * a,
        # exp(3) r^2 exp(-3 r) for A >= 0, exp(2) r^3 exp(-2 r) for A < 0
        "vespo": torch.where(a < 0, ratio**3 * (2 - 2 * ratio).exp(), ratio**2 * (3 - 3 * ratio).exp()) * a,
        # A - beta log r
        "dro": a - ratio.log(),
    }  # fmt: skip
    for loss, expected in coefficients.items():
        gradient = expected_gradient(CUR, TRAIN, ROLLOUT, policy_loss=loss)
        torch.testing.assert_close(gradient, expected_of(expected), rtol=1e-4, atol=1e-6)
        assert relative_error(gradient) > 0.05, loss


def test_thresholds_of_the_batch_bias_exactly_as_their_formula_says() -> None:
    cur, train, rollout = (p.double().log_softmax(-1) for p in (CUR, TRAIN, ROLLOUT))
    mismatch, a = (train - rollout).exp(), ADVANTAGES.double()
    # Log-ratios of the four actions, squared: 0.026, 0.056, 0.069, 0.114; the two largest lift the mean over 0.045.
    squares, kept = (train - rollout).square().sort().values, (train - rollout).square()
    assert squares[:2].mean() < 0.045 < squares[:3].mean()
    share = mismatch.sum() ** 2 / (4 * mismatch.square().sum())
    weights = {
        "m2po_function": torch.where(kept <= squares[1], mismatch, 0.0),
        "ess_tis_function": mismatch.clamp(max=float(share)),
    }
    for hook, weight in weights.items():
        flags = correction(hook) | {"policy_loss": "ppo", "m2po_threshold": 0.045}
        gradient = expected_gradient(CUR, TRAIN, ROLLOUT, **flags)
        expected = expected_of(weight * (cur - train).exp() * a)
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
        # ... and not at all when engine and trainer agree
        assert relative_error(expected_gradient(CUR, TRAIN, TRAIN, **flags)) < 1e-5


def test_what_selects_or_adds_biases_exactly_as_its_formula_says() -> None:
    cur, train, rollout = (p.double().log_softmax(-1) for p in (CUR, TRAIN, ROLLOUT))
    a, mismatch, moved = ADVANTAGES.double(), (train - rollout).exp(), cur - train
    exact = mismatch * moved.exp() * a
    # of A - 0.7 = 0.3, -1.2, 1.3, -0.4 and of what log pi_train is from its mean
    covariance = (a - a.mean()) * (train - train.mean())
    assert covariance.max() < 0.5
    tis, nll = correction("vanilla_tis_function"), {"positive_nll_coef": 0.1}
    dropping = {"clip_cov_ratio": 1.0, "clip_cov_low": -0.1, "clip_cov_high": 1.0}
    inside = (covariance > -0.1) & (covariance < 1)
    assert 0 < int(inside.sum()) < 4
    largest = covariance >= covariance.sort().values[-2]
    for flags, expected in (
        ({"policy_loss": "clip_cov", **dropping, **tis}, torch.where(inside, 0.0, exact)),
        # the pull is no gradient of the advantage and not weighted
        (
            {"policy_loss": "kl_cov", "kl_cov_ratio": 0.5, "kl_cov_coef": 0.3, **tis},
            exact - 0.3 * torch.where(largest, moved.sign(), 0.0),
        ),
        ({"policy_loss": "reinforce", **nll}, a + 0.1 * (a > 0)),
        # one factor for all: the direction is exact
        ({"policy_loss": "ppo", "tis_batch_normalize": True, **tis}, exact / mismatch.mean()),
    ):
        gradient = expected_gradient(CUR, TRAIN, ROLLOUT, **flags)
        torch.testing.assert_close(gradient, expected_of(expected), rtol=1e-4, atol=1e-6)
    # On the first update nothing pulls.
    first = {"policy_loss": "kl_cov", "kl_cov_ratio": 1.0, **tis}
    assert relative_error(expected_gradient(CUR, CUR, ROLLOUT, **first)) < 1e-5


@pytest.mark.parametrize("base", sorted(POLICY_LOSSES))
def test_every_loss_is_exact_when_all_policies_agree(base: str) -> None:
    assert relative_error(expected_gradient(CUR, CUR, CUR, policy_loss=base)) < 1e-5


def test_truncation_trades_bias_for_bounded_weights() -> None:
    errors = [
        relative_error(
            expected_gradient(
                CUR, TRAIN, ROLLOUT, policy_loss="ppo", tis_clip=cap, **correction("vanilla_tis_function")
            )
        )
        for cap in (0.8, 1.0, 1.2, 1e6)
    ]  # fmt: skip
    assert errors == sorted(errors, reverse=True) and errors[0] > 0.05 and errors[-1] < 1e-5
