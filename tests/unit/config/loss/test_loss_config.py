"""Combinations of loss flags that cannot work are errors before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from plugin.config import RATIO_LOSSES, ROLLOUT_LOSSES, LossConfig, parse_rejection_rules
from plugin.errors import ConfigError
from plugin.loss import POLICY_LOSSES

OFF_POLICY = "plugin.ppo_utils.off_policy_is_function"


def refused(message: str, **flags: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        LossConfig(**flags)


@pytest.mark.parametrize(
    "low, high",
    [
        ("tis_clip_low", "tis_clip"),
        ("sequence_tis_clip_low", "sequence_tis_clip"),
        ("icepop_ratio_low", "icepop_ratio_high"),
        ("ipo_ratio_low", "ipo_ratio_high"),
        ("geometric_mask_low", "geometric_mask_high"),
    ],
)
def test_a_band_needs_low_below_high(low: str, high: str) -> None:
    options = [f"--{name.replace('_', '-')}" for name in (low, high)]
    for values in ((2.0, 1.0), (1.0, 1.0)):
        message = f"{options[0]} is {values[0]} and {options[1]} is {values[1]}; the lower must"
        refused(message, **{low: values[0], high: values[1]})


@pytest.mark.parametrize("name", ["dppo_diff", "dppo_mask"])
def test_a_probability_difference_lies_between_zero_and_one(name: str) -> None:
    for bad in (0.0, 1.5):
        refused("difference of probabilities", **{f"{name}_low": bad})
        refused("difference of probabilities", **{f"{name}_high": bad})
    refused("at least 0", **{f"{name}_low": -0.1})


@pytest.mark.parametrize(
    "coefficient",
    ["kl_loss_coef", "rollout_kl_loss_coef", "entropy_coef", "kl_tau", "adv_tau", "teacher_tau"],
)
def test_a_coefficient_is_not_negative(coefficient: str) -> None:
    option = f"--{coefficient.replace('_', '-')}"
    refused(
        f"{option} is -0.1; it must be at least 0",
        **{coefficient: -0.1, "policy_loss": "icepop", "use_kl_loss": True, "use_rollout_kl_loss": True},
    )  # fmt: skip


@pytest.mark.parametrize(
    "flag, values",
    [
        ("policy_loss", "ppo, reinforce, cispo"),
        ("advantage_estimator", "grpo, dr_grpo, rloo, opo, reinforce_plus_plus"),
        ("rollout_kl_estimator_type", "k1, abs, k2, k3"),
        ("kl_loss_type", "k1, abs, k2, k3, low_var_kl"),
        ("rollout_kl_scope", "all, kept"),
        ("loss_denominator", "original, kept"),
        ("sequence_tis_level", "sequence, geometric"),
        ("validate_batch", "auto, always, never"),
    ],
)
def test_an_unknown_choice_lists_the_choices(flag: str, values: str) -> None:
    refused(f"is 'k9'; choose one of {values}", **{flag: "k9"})


@pytest.mark.parametrize("loss", ROLLOUT_LOSSES)
def test_use_tis_is_refused_on_a_loss_that_compares_with_the_rollout_policy(loss: str) -> None:
    refused(f"--use-tis with --policy-loss {loss}.*drop --use-tis", policy_loss=loss, use_tis=True)


@pytest.mark.parametrize("loss", RATIO_LOSSES)
@pytest.mark.parametrize(
    "path",
    [
        OFF_POLICY,
        "plugin.ppo_utils:off_policy_is_function",
        "plugin/ppo_utils/corrections.py:off_policy_is_function",
        f"plugin.ppo_utils.veto_function, {OFF_POLICY}",
    ],
)
def test_off_policy_is_on_a_base_with_a_ratio_needs_insistence(loss: str, path: str) -> None:
    flags = {"policy_loss": loss, "use_tis": True, "custom_tis_function_path": path}
    refused("counts pi_theta/pi_old twice.*--policy-loss reinforce", **flags)
    with pytest.warns(UserWarning, match="counts pi_theta/pi_old twice"):
        LossConfig(**flags, allow_biased_correction=True)


def test_off_policy_is_belongs_on_reinforce() -> None:
    LossConfig(policy_loss="reinforce", use_tis=True, custom_tis_function_path=OFF_POLICY)


def test_settings_that_would_do_nothing_are_refused() -> None:
    refused("--kl-loss-coef is 0.1 but --use-kl-loss is off", kl_loss_coef=0.1)
    refused("--rollout-kl-loss-coef is 0.1 but --use-rollout-kl-loss", rollout_kl_loss_coef=0.1)
    refused("would never run; add --use-tis", custom_tis_function_path="a.b.c")
    refused("every weight is 1; drop one of the two", use_tis=True, use_rollout_logprobs=True)


def test_the_kept_denominator_cannot_serve_two_terms_over_all_tokens() -> None:
    refused(
        "--loss-denominator kept with a global token denominator and --entropy-coef",
        policy_loss="icepop",
        loss_denominator="kept",
        entropy_coef=0.1,
    )


@pytest.mark.parametrize(
    "flags",
    [
        {"eps_clip": 0.0},
        {"eps_clip_high": -0.1},
        {"eps_clip_c": 1.0},
        {"dppo_ratio_cap": 0.5},
        {"veto_threshold": 0.0},
        {"veto_threshold": 1.0},
        {"rollout_temperature": 0.0},
        {"gamma": 1.1},
        {"lambd": -0.1},
        {"lambd": 1.1},
        {"sapo_tau_pos": 0.0},
        {"opsm_delta": -1.0},
    ],
)
def test_numbers_outside_their_range_are_refused(flags: dict[str, Any]) -> None:
    refused("--" + next(iter(flags)).replace("_", "-"), **flags)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_losses_against_the_rollout_policy_are_means_over_tokens_by_default(loss: str) -> None:
    assert LossConfig(policy_loss=loss).per_token is (loss in ROLLOUT_LOSSES)
    assert LossConfig(policy_loss=loss, calculate_per_token_loss=True).per_token
    assert not LossConfig(policy_loss=loss, calculate_per_token_loss=False).per_token


def test_features_that_need_rollout_log_probs_are_listed() -> None:
    config = LossConfig(use_tis=True, use_rollout_kl_loss=True)
    assert config.needs_rollout_log_probs() == ["--use-tis", "--use-rollout-kl-loss"]
    config.require_rollout_log_probs(True)
    with pytest.raises(ConfigError, match="--use-tis, --use-rollout-kl-loss needs"):
        config.require_rollout_log_probs(False)
    LossConfig().require_rollout_log_probs(False)


def test_rejection_rules_are_parsed() -> None:
    rules = parse_rejection_rules("token_ratio=0.5:2, mean_k3=:0.01,max_k1=-1e-3:")
    assert [(r.name, r.low, r.high) for r in rules] == [
        ("token_ratio", 0.5, 2.0),
        ("mean_k3", -float("inf"), 0.01),
        ("max_k1", -1e-3, float("inf")),
    ]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "is empty"),
        (" , ", "is empty"),
        ("ratio=0.5:2", "write level_statistic=low:high"),
        ("token_k4=0.5:2", "write level_statistic=low:high"),
        ("median_ratio=0.5:2", "write level_statistic=low:high"),
        ("token_ratio", "write level_statistic=low:high"),
        ("token_ratio=0.5", "write level_statistic=low:high"),
        ("token_ratio=a:b", "write level_statistic=low:high"),
        ("token_ratio=2:1", "low 2.0 must be below high 1.0"),
        ("token_ratio=1:1", "must be below"),
        ("token_ratio=nan:1", "must be below"),
        ("token_ratio=:0", "high must be too"),
        ("token_k1=:", "keeps everything"),
    ],
)
def test_bad_rejection_rules_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_rejection_rules(text)
    with pytest.raises(ConfigError, match=message):
        LossConfig(rejection_rules=text)
