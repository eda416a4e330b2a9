"""verl: the documented signature always, verl itself where it is installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.adapters import verl as adapter
from plugin.config import LossConfig
from plugin.errors import ConfigError
from tests.unit.adapters.padded_samples import (
    ADVANTAGES,
    MASK,
    assert_same,
    spoiled,
    three_policies,
)

#: verl's default clip and dual clip.
PPO = {"eps_clip": 0.2, "eps_clip_c": 3.0}


def aggregate(loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str, **_: Any) -> Tensor:
    """verl's token-mean: sum over the mask by multiplication."""
    assert loss_agg_mode == "token-mean"
    return (loss_mat * loss_mask).sum() / loss_mask.sum()


def call(loss: adapter.PolicyLoss, cur: Tensor, old: Tensor, **extra: Any) -> tuple[Tensor, Any]:
    return loss(
        old_log_prob=old,
        log_prob=cur,
        advantages=ADVANTAGES,
        response_mask=MASK.bool(),
        loss_agg_mode="token-mean",
        config=SimpleNamespace(global_batch_info={}),
        **extra,
    )


def test_a_policy_loss_takes_verls_call_and_answers_with_numbers() -> None:
    policies = three_policies()
    loss, metrics = call(
        adapter.policy_loss(LossConfig(**PPO), aggregate), policies["cur"], policies["train"]
    )
    assert loss.requires_grad and loss.dim() == 0
    assert {"actor/ppo_kl", "actor/pg_clipfrac"} <= metrics.keys()
    assert all(isinstance(value, float) for value in metrics.values())


def test_in_bypass_mode_the_old_log_probs_are_the_engines() -> None:
    cur = torch.full((1, 2), -1.0).requires_grad_()
    rollout = torch.tensor(
        [[-1.5, -4.0]]
    )  # ratios e^0.5 = 1.649 and e^3 = 20.1: the second is dropped
    loss = adapter.policy_loss(LossConfig(policy_loss="icepop"), aggregate, old_is_rollout=True)
    value, metrics = loss(rollout, cur, torch.ones(1, 2), torch.ones(1, 2))
    assert value.item() == pytest.approx(-1.6487 / 2, abs=1e-4)
    assert metrics["actor/is_masked"] == 0.5


def test_a_loss_that_needs_the_engines_log_probs_is_refused_where_verl_has_none() -> None:
    with pytest.raises(ConfigError, match="bypass_mode=true"):
        adapter.policy_loss(LossConfig(policy_loss="dppo_tv"), aggregate)


def test_correction_weights_are_those_of_the_hook_and_rejection_follows_the_denominator() -> None:
    old = torch.log(torch.tensor([[0.4, 0.4, 0.1]]))
    rollout = torch.log(torch.tensor([[0.2, 0.1, 0.4]]))  # ratios 2, 4, 0.25
    mask = torch.tensor([[1, 1, 1]])
    config = LossConfig(use_tis=True, tis_clip=3.0)
    weights, kept, metrics = adapter.rollout_correction(config, old, rollout, mask)
    torch.testing.assert_close(weights, torch.tensor([[2.0, 3.0, 0.25]]))
    assert torch.equal(kept, mask)
    assert metrics["rollout_corr/ratio_mean"] == pytest.approx(6.25 / 3)

    rejecting: dict[str, Any] = {
        "use_tis": True,
        "custom_tis_function_path": "plugin.ppo_utils.rejection_function",
        "rejection_rules": "token_ratio=0.5:3",
    }
    weights, kept, metrics = adapter.rollout_correction(LossConfig(**rejecting), old, rollout, mask)
    assert weights.tolist() == [[1.0, 0.0, 0.0]] and torch.equal(kept, mask)
    assert metrics["rollout_corr/rejected"] == pytest.approx(2 / 3)
    config = LossConfig(**rejecting, loss_denominator="kept")
    _, kept, _ = adapter.rollout_correction(config, old, rollout, mask)
    assert kept.tolist() == [[1, 0, 0]]


def test_correction_weights_ignore_what_is_masked() -> None:
    policies = three_policies()
    config = LossConfig(use_tis=True)
    clean = adapter.rollout_correction(config, policies["train"], policies["rollout"], MASK)
    dirty = adapter.rollout_correction(
        config, spoiled(policies["train"]), spoiled(policies["rollout"]), MASK
    )
    assert torch.equal(clean[0], dirty[0]) and clean[2] == dirty[2]
    assert not clean[0][MASK == 0].any()


@pytest.fixture
def core_algos() -> Any:
    return pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed")


def actor_config() -> Any:
    from verl.workers.config import ActorConfig

    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)


def test_ppo_equals_verls_own(core_algos: Any) -> None:
    policies, config = three_policies(), actor_config()
    name = "megatron_tis_ppo"
    adapter.register(name, LossConfig(**PPO))
    results = []
    for which in (name, "vanilla"):
        results.append(
            core_algos.get_policy_loss_fn(which)(
                old_log_prob=policies["train"],
                log_prob=policies["cur"],
                advantages=ADVANTAGES,
                response_mask=MASK.bool(),
                loss_agg_mode="seq-mean-token-mean",
                config=config,
                rollout_is_weights=torch.full((2, 4), 1.5),
            )
        )
    assert_same(results[0], results[1], policies["cur"])
    assert results[0][1]["actor/ppo_kl"] == pytest.approx(results[1][1]["actor/ppo_kl"], abs=1e-6)


def test_token_weights_equal_verls_own(core_algos: Any) -> None:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    policies = three_policies()
    config = LossConfig(use_tis=True, tis_clip=1.2)
    mine, _, _ = adapter.rollout_correction(config, policies["train"], policies["rollout"], MASK)
    theirs, _ = compute_rollout_correction_weights(
        policies["train"] - policies["rollout"], MASK, "token", 1.2
    )
    torch.testing.assert_close(mine, theirs)


def test_verls_trainer_finds_the_installed_correction(
    core_algos: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl import DataProto
    from verl.trainer.ppo import rollout_corr_helper

    name = "compute_rollout_correction_and_add_to_batch"
    monkeypatch.setattr(rollout_corr_helper, name, getattr(rollout_corr_helper, name))
    adapter.install_rollout_correction(LossConfig(use_tis=True, tis_clip=1.2))
    policies = three_policies()
    batch = DataProto.from_dict(
        tensors={
            "old_log_probs": policies["train"],
            "rollout_log_probs": policies["rollout"],
            "response_mask": MASK,
        }
    )
    batch, metrics = getattr(rollout_corr_helper, name)(batch, {"rollout_is": "token"})
    weights = batch.batch["rollout_is_weights"]
    assert weights.shape == (2, 4) and weights.max() <= 1.2 + 1e-6
    assert "rollout_corr/weight_mean" in metrics
