"""KL and entropy terms, and the denominators, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from plugin.config import LossConfig
from plugin.errors import ConfigError
from plugin.loss import compute_loss, loss_inputs, reduce_loss
from plugin.loss.normalization import (
    kept_token_scale,
    sample_denominators,
    token_weights,
    weighted_sum,
)
from plugin.ppo_utils import SequenceShards
from tests.unit.loss.sample_batches import logs, random_batch, run

CPU = torch.device("cpu")


def terms(config: LossConfig, entropy: torch.Tensor | None = None, **changes: Any) -> Any:
    """Terms of two tokens: cur -1, -2; ref -1.5, -1; train -1, -2.5; rollout -1, -2 + log 10."""
    batch = {
        "response_lengths": [2],
        "total_lengths": [3],
        "loss_masks": [torch.ones(2)],
        "advantages": [torch.zeros(2)],
        "log_probs": [torch.tensor([-1.0, -2.5])],
        "ref_log_probs": [torch.tensor([-1.5, -1.0])],
        "rollout_log_probs": [torch.tensor([-1.0, -2.0 - math.log(10)])],
        **changes,
    }
    cur = torch.tensor([-1.0, -2.0], requires_grad=True)
    outputs = compute_loss(config, loss_inputs(config, batch, cur, entropy))
    by_name = {term.name: term for term in outputs.regularizers}
    return cur, by_name


def test_reference_kl_by_hand() -> None:
    # d = 0.5, -1: k2 = 0.125, 0.5; gradient d
    cur, found = terms(LossConfig(use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="k2"))
    assert found["kl_loss"].values.tolist() == [0.125, 0.5]
    assert found["kl_loss"].coefficient == 0.3
    found["kl_loss"].values.sum().backward()
    assert cur.grad.tolist() == [0.5, -1.0]


def test_unbiased_reference_kl_is_weighted_by_the_ratio_with_its_gradient() -> None:
    # weights exp(cur - train) = 1, e^0.5; k1: 0.5 * 1, -1 * 1.64872; gradient w (1 + d) = 1.5, 0
    config = LossConfig(use_kl_loss=True, kl_loss_coef=0.3, use_unbiased_kl=True)
    cur, found = terms(config)
    torch.testing.assert_close(found["kl_loss"].values, torch.tensor([0.5, -math.exp(0.5)]))
    found["kl_loss"].values.sum().backward()
    torch.testing.assert_close(cur.grad, torch.tensor([1.5, 0.0]))


@pytest.mark.parametrize("kind, expected", [
    ("k1", math.log(10)), ("abs", math.log(10)), ("k2", math.log(10) ** 2 / 2),
    ("k3", 0.1 - 1 + math.log(10)),
])  # fmt: skip
def test_rollout_kl_by_hand(kind: str, expected: float) -> None:
    # d = cur - rollout = 0, log 10
    config = LossConfig(
        use_rollout_kl_loss=True, rollout_kl_loss_coef=1.0, rollout_kl_estimator_type=kind
    )
    _, found = terms(config)
    assert found["rollout_kl"].values.tolist() == pytest.approx([0.0, expected])


@pytest.mark.parametrize("scope, second", [("all", math.log(10)), ("kept", 0.0)])
def test_rollout_kl_covers_dropped_tokens_unless_told_otherwise(scope: str, second: float) -> None:
    # icepop drops the second token, whose ratio is 10
    config = LossConfig(
        policy_loss="icepop",
        use_rollout_kl_loss=True,
        rollout_kl_loss_coef=1.0,
        rollout_kl_estimator_type="k1",
        rollout_kl_scope=scope,
    )
    cur, found = terms(config)
    assert found["rollout_kl"].values.tolist() == pytest.approx([0.0, second])
    found["rollout_kl"].values.sum().backward()
    assert cur.grad.tolist() == [1.0, 1.0 if scope == "all" else 0.0]


def test_a_coefficient_of_zero_makes_a_metric_without_a_graph() -> None:
    _, found = terms(LossConfig(use_kl_loss=True, use_rollout_kl_loss=True))
    assert set(found) == {"kl_loss", "rollout_kl"}
    assert not any(term.values.requires_grad for term in found.values())


def test_entropy_enters_with_a_minus_sign_and_a_graph_only_with_a_coefficient() -> None:
    entropy = torch.tensor([0.5, 1.5], requires_grad=True)
    _, found = terms(LossConfig(entropy_coef=0.1), entropy)
    assert found["entropy_loss"].coefficient == -0.1
    assert found["entropy_loss"].values.tolist() == [0.5, 1.5]
    assert found["entropy_loss"].values.requires_grad
    _, found = terms(LossConfig(), entropy)
    assert not found["entropy_loss"].values.requires_grad


def test_the_loss_is_policy_plus_coefficients_times_terms() -> None:
    config = LossConfig(use_kl_loss=True, kl_loss_coef=0.3, entropy_coef=0.1)
    loss, _, metrics = run(config, *random_batch([[1, 1], [1]]))
    expected = metrics["pg_loss"] + 0.3 * metrics["kl_loss"] - 0.1 * metrics["entropy_loss"]
    torch.testing.assert_close(loss, expected)
    assert torch.equal(metrics["loss"], loss)


# Two samples: three tokens (one masked) and one token.
MASKS = [torch.tensor([1, 0, 1]), torch.tensor([1])]
SHARDS = SequenceShards.of([4, 2], [3, 1], CPU)
VALUES = torch.tensor([1.0, math.nan, 3.0, 10.0])


def weights(**changes: Any) -> torch.Tensor:
    arguments = {"per_token": False, "mask_sums": None, **changes}
    return token_weights(SHARDS, SHARDS.local_mask(MASKS), MASKS, **arguments)


def test_sample_means_weigh_each_sample_once() -> None:
    w = weights()
    assert w.tolist() == [0.5, 0.0, 0.5, 1.0]
    # (1 + 3) / 2 + 10 / 1 = 12, over sum w = 2 samples
    assert weighted_sum(w)(VALUES).item() == 12.0 and w.sum().item() == 2.0


def test_one_token_denominator_weighs_each_token_once() -> None:
    w = weights(per_token=True)
    assert w.tolist() == [1.0, 0.0, 1.0, 1.0]
    assert weighted_sum(w)(VALUES).item() == 14.0 and w.sum().item() == 3.0


def test_mask_sums_of_a_whole_rollout_replace_the_samples_own_count() -> None:
    assert weights(mask_sums=[4.0, torch.tensor(2.0)]).tolist() == [0.25, 0.0, 0.25, 0.5]
    assert sample_denominators([], []).tolist() == []


def test_a_fully_masked_sample_weighs_nothing_and_divides_nothing() -> None:
    assert sample_denominators([torch.zeros(3), torch.ones(2)]).tolist() == [1.0, 2.0]
    shards = SequenceShards.of(None, [2, 1], CPU)
    masks = [torch.zeros(2), torch.ones(1)]
    w = token_weights(shards, shards.local_mask(masks), masks, per_token=False)
    assert w.tolist() == [0.0, 0.0, 1.0]


def test_the_kept_denominator_rescales_each_sample() -> None:
    # sample 0 keeps 1 of 2 tokens: factor 2; sample 1 keeps none: factor 1 (of a loss that is 0 anyway)
    kept = torch.tensor([True, False, False, False])
    scale = kept_token_scale(kept, SHARDS.local_mask(MASKS), SHARDS)
    assert scale.tolist() == [2.0, 2.0, 2.0, 1.0]


@pytest.mark.parametrize("denominator, expected", [("original", -1.0), ("kept", -2.0)])
def test_rejected_tokens_stay_in_the_denominator_unless_told_otherwise(
    denominator: str, expected: float
) -> None:
    # icepop as a sample mean: r = 2 kept, r = 6 dropped; A = 1: (-2 + 0) / 2 = -1, or -2 / 1
    config = LossConfig(
        policy_loss="icepop", calculate_per_token_loss=False, loss_denominator=denominator
    )
    batch = {
        "response_lengths": [2],
        "total_lengths": [3],
        "loss_masks": [torch.ones(2)],
        "advantages": [torch.ones(2)],
        "rollout_log_probs": [torch.zeros(2)],
    }
    inputs = loss_inputs(config, batch, logs(2.0, 6.0).requires_grad_())
    outputs = compute_loss(config, inputs)
    loss, _ = reduce_loss(config, outputs, lambda x: x.sum() / 2)
    assert loss.item() == pytest.approx(expected)


def test_the_kept_denominator_over_all_tokens_is_left_to_the_backend() -> None:
    config = LossConfig(loss_denominator="kept", calculate_per_token_loss=True)
    with pytest.raises(ConfigError, match="only the backend's own step can count"):
        run(config, *random_batch([[1]]))
