"""prime-rl is not on PyPI: tested against its documented interface, written down here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.errors import ConfigError
from plugin.loss import load_function
from tests.unit.adapters.padded_samples import gradient


@dataclass
class LossInputs:
    """The fields that prime-rl documents for a custom loss; one sample, [S] each."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


@dataclass
class LossOutputs:
    """What prime-rl expects back."""

    loss: Tensor
    metrics: dict[str, Tensor]


policy_loss = load_function("plugin.adapters.prime_rl.policy_loss")


def sample(**changes: Any) -> LossInputs:
    """Two prompt tokens, then ratios e^0.2, e^-0.3, e^4; the last is outside every band."""
    values: dict[str, Any] = {
        "trainer_logprobs": torch.tensor([0.0, 0.0, -1.0, -2.0, -1.0]).requires_grad_(),
        "inference_logprobs": torch.tensor([float("nan"), 0.0, -1.2, -1.7, -5.0]),
        "ref_logprobs": None,
        "advantages": torch.tensor([0.0, 0.0, 2.0, -1.0, 1.0]),
        "loss_mask": torch.tensor([False, False, True, True, True]),
    }
    return LossInputs(**{**values, **changes})


def test_the_loss_is_a_sum_over_the_tokens_of_one_sample() -> None:
    inputs = sample()
    outputs = policy_loss(inputs, policy_loss="icepop")
    assert isinstance(outputs, LossOutputs)
    # -2 e^0.2 + 1 e^-0.3; the third token is dropped
    assert outputs.loss.item() == pytest.approx(-2 * 1.221403 + 0.740818, abs=1e-5)
    slope = gradient(outputs.loss, inputs.trainer_logprobs)
    torch.testing.assert_close(slope, torch.tensor([0.0, 0.0, -2.442806, 0.740818, 0.0]))
    assert outputs.metrics["is_masked"].item() == pytest.approx(1 / 3)
    assert outputs.metrics["mismatch_kl"].isfinite()


def test_the_components_weights_multiply_the_tokens() -> None:
    weights = torch.tensor([float("nan"), 1.0, 0.5, 2.0, 1.0])
    outputs = policy_loss(sample(loss_weights=weights), policy_loss="icepop")
    assert outputs.loss.item() == pytest.approx(-2 * 1.221403 * 0.5 + 0.740818 * 2, abs=1e-5)


def test_the_reference_can_teach() -> None:
    reference = torch.zeros(5)
    taught = policy_loss(sample(ref_logprobs=reference), policy_loss="icepop", teacher_tau=0.1)
    # advantages become 2 + 0.1 * 1 and -1 + 0.1 * 2
    assert taught.loss.item() == pytest.approx(-2.1 * 1.221403 + 0.8 * 0.740818, abs=1e-5)
    with pytest.raises(ConfigError, match="no teacher_log_probs"):
        policy_loss(sample(), policy_loss="icepop", teacher_tau=0.1)


def test_a_loss_whose_ratio_would_always_be_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="use_rollout_logprobs = true"):
        policy_loss(sample(), policy_loss="ppo")
    clipped = policy_loss(sample(), policy_loss="ppo", use_rollout_logprobs=True)
    # -min(e^0.2, 1.2) 2 + max(e^-0.3, 0.8) - min(e^4, 1.2)
    assert clipped.loss.item() == pytest.approx(-1.2 * 2 + 0.8 - 1.2, abs=1e-5)


def test_the_engines_ratio_on_plain_policy_gradient_is_cispo() -> None:
    outputs = policy_loss(
        sample(),
        policy_loss="reinforce",
        use_tis=True,
        custom_tis_function_path="plugin.ppo_utils.off_policy_is_function",
    )
    # weights clip(e^0.2) = 1.2, clip(e^-0.3) = 0.8, clip(e^4) = 1.2; loss = -w A cur
    assert outputs.loss.item() == pytest.approx(1.2 * 2 * 1 - 0.8 * 2 + 1.2 * 1, abs=1e-5)


def test_a_sample_without_loss_tokens_keeps_its_graph() -> None:
    inputs = sample(loss_mask=torch.zeros(5, dtype=torch.bool))
    outputs = policy_loss(inputs, policy_loss="icepop")
    assert outputs.loss.item() == 0.0
    assert not gradient(outputs.loss, inputs.trainer_logprobs).any()


def test_an_unknown_setting_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'icepop_ratio_hi'"):
        policy_loss(sample(), policy_loss="icepop", icepop_ratio_hi=4.0)
