"""When truncated sampling is replayed, and when it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from plugin.config import JobConfig
from plugin.errors import ConfigError

SGLANG = {
    "rollout_engine": "http",
    "rollout_url": "http://127.0.0.1:1",
    "rollout_weights_dir": "w",
    "rollout_server": "sglang",
}
VLLM_SERVER = {**SGLANG, "rollout_server": "vllm"}


@pytest.mark.parametrize(
    "settings, replays",
    [
        ({}, False),
        ({"rollout_top_p": 0.9}, True),
        ({"rollout_top_k": 20}, True),
        ({"rollout_min_p": 0.1}, True),
        ({"rollout_top_k": 20, "use_rollout_sampling_mask": "on"}, True),
        ({"rollout_top_k": 20, "rollout_engine": "vllm"}, True),
        ({"rollout_top_k": 20, **SGLANG}, True),
        (
            {
                "rollout_top_k": 20,
                "use_rollout_sampling_mask": "off",
                "allow_biased_correction": True,
            },
            False,
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*gradients are biased")
def test_auto_replays_where_the_engine_truncates_and_reports(
    settings: dict[str, Any], replays: bool
) -> None:
    assert JobConfig.from_sources(settings).replays_sampling_mask is replays


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"use_rollout_sampling_mask": "off"}, "insist with --allow-biased-correction"),
        ({"use_rollout_sampling_mask": "off", "policy_loss": "icepop"}, "ratios .* are biased"),
        (
            {
                "use_rollout_sampling_mask": "off",
                "policy_loss": "reinforce",
                "use_tis": True,
                "custom_tis_function_path": "plugin.ppo_utils.off_policy_is_function",
            },
            "ratios .* are biased",
        ),
        (VLLM_SERVER, "ratios .* are biased"),
        ({"rollout_engine": "my.engine:make"}, "ratios .* are biased"),
        ({**VLLM_SERVER, "use_rollout_sampling_mask": "on"}, "with vLLM servers does not report"),
    ],
)
def test_truncation_without_a_report_is_refused_where_there_is_a_ratio(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig.from_sources({"rollout_top_p": 0.9, **settings})


@pytest.mark.parametrize(
    "engine", [{"rollout_engine": "vllm"}, {"rollout_engine": "sglang"}, SGLANG]
)
def test_ids_that_min_p_keeps_are_known_of_the_transformers_engine_alone(
    engine: dict[str, Any],
) -> None:
    for mask in ({}, {"use_rollout_sampling_mask": "on"}):
        message = (
            "--rollout-min-p keeps; use --rollout-engine transformers|--rollout-min-p: the engine"
        )
        with pytest.raises(ConfigError, match=message):
            JobConfig.from_sources({"rollout_min_p": 0.1, **engine, **mask})


def test_without_a_ratio_it_is_a_warning() -> None:
    settings = {"policy_loss": "reinforce", "use_rollout_sampling_mask": "off"}
    with pytest.warns(UserWarning, match="gradients are biased"):
        JobConfig.from_sources({"rollout_top_p": 0.9, **settings})


def test_an_own_engine_may_report() -> None:
    settings = {"rollout_engine": "my.engine:make", "use_rollout_sampling_mask": "on"}
    assert JobConfig.from_sources({"rollout_top_p": 0.9, **settings}).replays_sampling_mask


def test_vllm_wants_a_bound_of_the_kept_ids() -> None:
    with pytest.raises(ConfigError, match="add --rollout-top-k"):
        JobConfig.from_sources({"rollout_top_p": 0.9, "rollout_engine": "vllm"})


def test_flags_of_the_mask_do_nothing_without_truncation() -> None:
    for flag in ({"use_rollout_sampling_mask": "on"}, {"entropy_of": "kept"}):
        with pytest.raises(ConfigError, match="would do nothing"):
            JobConfig.from_sources(flag)
    JobConfig.from_sources({"rollout_top_p": 0.9, "entropy_of": "kept"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"rollout_top_p": 0.9, "use_rollout_sampling_mask": "off", "policy_loss": "reinforce"},
            "whose kept ids are not replayed",
        ),
        (
            {"rollout_top_k": 20, "rollout_engine": "sglang", "policy_loss": "icepop"},
            "SGLang, which reports the log-probs of its likeliest ids before truncation",
        ),
        ({"num_updates_per_rollout": 2}, "2 updates per rollout and --policy-loss ppo: after the first"),
        (
            {"num_updates_per_rollout": 2, "policy_loss": "reinforce", "use_tis": True},
            "2 updates per rollout and plugin.ppo_utils.vanilla_tis_function",
        ),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_score_centering_is_refused_where_the_weight_of_other_ids_is_not_known(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig(score_centering_topk=4, **settings)
    JobConfig(**settings, allow_biased_correction="rollout_top_p" in settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"policy_loss": "icepop"},
        {"policy_loss": "ppo", "train_log_probs": "rollout"},
        {
            "policy_loss": "reinforce",
            "use_tis": True,
            "custom_tis_function_path": "plugin.ppo_utils.veto_function,plugin.ppo_utils.off_policy_is_function",
        },
    ],
)
def test_score_centering_goes_with_several_updates_where_nothing_is_of_the_old_policy(
    settings: dict[str, Any],
) -> None:
    JobConfig(score_centering_topk=4, num_updates_per_rollout=2, **settings)
