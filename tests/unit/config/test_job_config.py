"""Settings of a job that do not fit together are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from plugin.config import JobConfig
from plugin.errors import ConfigError

OPSM = {"use_tis": True, "custom_tis_function_path": "plugin.ppo_utils.opsm_function"}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"policy_loss": "reinforce"},
        {"policy_loss": "gspo", "get_mismatch_metrics": True},
        # a pull towards the rollout policy weights nothing
        {"use_rollout_kl_loss": True, "rollout_kl_loss_coef": 0.1},
        OPSM,
        # plain policy gradient reads no old log-probs
        {"policy_loss": "reinforce", "use_rollout_logprobs": True},
    ],
)
def test_old_samples_in_a_loss_that_never_compares_with_the_rollout_policy_are_refused(
    settings: dict[str, Any],
) -> None:
    for fix in ("--use-tis", "--policy-loss icepop", "--use-rollout-logprobs with ppo"):
        with pytest.raises(ConfigError, match=fix):
            JobConfig(async_rollouts=True, **settings)
    assert not JobConfig(**settings).corrects_mismatch, "synchronous: allowed"
    with pytest.warns(UserWarning, match="its gradient is biased"):
        JobConfig(async_rollouts=True, allow_biased_correction=True, **settings)
    JobConfig(async_rollouts=True, max_weight_staleness=0, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_tis": True},
        {"policy_loss": "dppo"},
        {"use_rollout_logprobs": True},
        {**OPSM, "use_rollout_logprobs": True},
        {
            "policy_loss": "reinforce",
            "use_tis": True,
            "custom_tis_function_path": "plugin.ppo_utils.off_policy_is_function",
        },
    ],
)
def test_a_loss_that_compares_with_the_rollout_policy_takes_old_samples(
    settings: dict[str, Any],
) -> None:
    assert JobConfig(async_rollouts=True, **settings).corrects_mismatch


@pytest.mark.parametrize(
    "value", ["every", "every:0", "every:-1", "every:x", "always", "First", ""]
)
def test_a_rule_for_verifying_weights_that_means_nothing_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="choose first, off, or every:N"):
        JobConfig(verify_weights=value)


def test_weights_are_verified_once_or_at_every_nth_version() -> None:
    first, every, off = (JobConfig(verify_weights=value) for value in ("first", "every:3", "off"))
    for version, again in enumerate((True, False, False, True)):
        assert first.verifies_weights(version, verified=False)
        assert not first.verifies_weights(version, verified=True)
        assert every.verifies_weights(version, verified=False)
        assert every.verifies_weights(version, verified=True) is again
        assert not off.verifies_weights(version, verified=False)


def test_insisting_on_nothing_is_refused() -> None:
    idle = {"async_rollouts": True, "use_tis": True, "allow_biased_correction": True}
    with pytest.raises(ConfigError, match="--allow-biased-correction would do nothing"):
        JobConfig.from_sources(idle)


def test_a_loss_of_ones_own_is_told_how_to_declare_that_it_compares() -> None:
    with pytest.raises(ConfigError, match=r"@loss_traits that .*own_loss"):
        JobConfig(async_rollouts=True, policy_loss=f"{__file__}:own_loss")


def own_loss(inputs: Any, config: Any) -> Any:
    raise NotImplementedError


def test_a_dynamic_loss_scale_cannot_begin_below_its_minimum() -> None:
    with pytest.raises(ConfigError, match=r"--min-loss-scale is 8.0, above --initial-loss-scale 4"):
        JobConfig(train_dtype="float16", initial_loss_scale=4.0, min_loss_scale=8.0)


@pytest.mark.parametrize(
    ("trainer", "engine", "rounds"),
    [
        ("float32", "float16", "--rollout-dtype float16"),
        ("bfloat16", "float16", "--rollout-dtype float16, with a trainer in bfloat16,"),
        ("float16", "bfloat16", "--rollout-dtype bfloat16, with a trainer in float16,"),
        ("auto", "bfloat16", "--rollout-dtype bfloat16, with a trainer in float32,"),
        ("float16", "float16", None),
        ("bfloat16", "float32", None),
    ],
)
def test_an_engine_in_another_half_precision_rounds_the_weights(
    trainer: Any, engine: Any, rounds: str | None
) -> None:
    config = JobConfig(train_dtype=trainer, rollout_dtype=engine)
    assert config.rounds_rollout_weights == rounds
