"""SkyRL: the documented signature always, SkyRL itself where it is installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plugin.adapters import skyrl as adapter
from plugin.config import LossConfig
from plugin.errors import ConfigError
from tests.unit.adapters.padded_samples import (
    ADVANTAGES,
    MASK,
    assert_same,
    spoiled,
    three_policies,
)


def test_a_policy_loss_takes_skyrls_call() -> None:
    policies = three_policies()
    loss, metrics = adapter.policy_loss(LossConfig(policy_loss="icepop"))(
        policies["cur"],
        policies["train"],
        ADVANTAGES,
        config=SimpleNamespace(),
        loss_mask=MASK,
        rollout_logprobs=policies["rollout"],
    )
    ratio = (policies["cur"] - policies["rollout"]).exp()
    assert bool(((ratio > 0.2) & (ratio < 5)).all())  # inside the band: nothing is dropped
    expected = (-ADVANTAGES * ratio * MASK).sum()
    torch.testing.assert_close(loss, expected)
    assert metrics["is_masked"] == 0.0 and all(isinstance(v, float) for v in metrics.values())


def test_a_scaled_mask_weights_the_sum() -> None:
    policies = three_policies()
    loss = adapter.policy_loss(LossConfig())
    arguments: Any = (policies["cur"], policies["train"], ADVANTAGES, None)
    whole, _ = loss(*arguments, MASK, None)
    half, _ = loss(*arguments, MASK / 2, None)
    torch.testing.assert_close(half, whole / 2)


def test_what_is_masked_may_hold_anything() -> None:
    policies = three_policies()
    loss = adapter.policy_loss(LossConfig(use_tis=True))
    clean, _ = loss(policies["cur"], policies["train"], ADVANTAGES, None, MASK, policies["rollout"])
    dirty, _ = loss(
        spoiled(policies["cur"]), spoiled(policies["train"]), ADVANTAGES, None, MASK, spoiled(policies["rollout"]),
    )  # fmt: skip
    assert torch.equal(clean.detach(), dirty)


def test_a_penalty_that_skyrls_reduction_would_sum_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--kl-tau is 0\.001"):
        adapter.policy_loss(LossConfig(policy_loss="dppo"))
    adapter.policy_loss(LossConfig(policy_loss="dppo", kl_tau=0.0))
    for flags, option in (
        ({"policy_loss": "ipo_tv"}, "--kl-tau is 0.001"),
        ({"policy_loss": "dro"}, "--dro-beta is 1.0"),
        ({"policy_loss": "kl_cov"}, "--kl-cov-coef is 1.0"),
        ({"positive_nll_coef": 0.1}, "--positive-nll-coef is 0.1"),
        ({"policy_loss": "clip_cov"}, "--policy-loss clip_cov: SkyRL puts the denominator"),
    ):
        with pytest.raises(ConfigError, match=option):
            adapter.policy_loss(LossConfig(**flags))


def test_missing_engine_log_probs_fail_at_once() -> None:
    policies = three_policies()
    with pytest.raises(ConfigError, match="needs rollout_log_probs"):
        adapter.policy_loss(LossConfig(use_tis=True))(
            policies["cur"], policies["train"], ADVANTAGES, None, MASK, None
        )


@pytest.fixture
def ppo_utils() -> Any:
    try:
        from skyrl.backends.skyrl_train.utils import ppo_utils
    except (
        Exception
    ) as error:  # SkyRL 0.3 supports Python 3.12 alone and fails in its own way elsewhere
        pytest.skip(f"SkyRL does not import here: {error}")
    return ppo_utils


def algorithm(ppo_utils: Any, **changes: Any) -> Any:
    from skyrl.train.config.config import AlgorithmConfig

    return AlgorithmConfig(**changes)


@pytest.mark.parametrize(
    "theirs, mine",
    [
        ("regular", LossConfig(eps_clip=0.2)),
        ("dual_clip", LossConfig(eps_clip=0.2, eps_clip_c=3.0)),
        ("sapo", LossConfig(policy_loss="sapo")),
    ],
)
def test_losses_equal_skyrls_own(ppo_utils: Any, theirs: str, mine: LossConfig) -> None:
    policies = three_policies()
    config = algorithm(ppo_utils, policy_loss_type=theirs)
    name = f"megatron_tis_{theirs}"
    adapter.register(name, mine)
    results = [
        ppo_utils.PolicyLossRegistry.get(which)(
            policies["cur"],
            policies["train"],
            ADVANTAGES,
            config=config,
            loss_mask=MASK,
            rollout_logprobs=policies["rollout"],
        )
        for which in (name, theirs)
    ]
    ppo_utils.PolicyLossRegistry.unregister(name)
    assert_same(results[0], results[1], policies["cur"])


def test_a_registered_loss_survives_the_way_to_a_worker(ppo_utils: Any) -> None:
    import cloudpickle

    loss = cloudpickle.loads(cloudpickle.dumps(adapter.policy_loss(LossConfig())))
    policies = three_policies()
    value, _ = loss(policies["cur"], policies["train"], ADVANTAGES, None, MASK, None)
    assert bool(value.isfinite())
