"""A flag that would do nothing is refused where a person gives it, and only there."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml

from plugin.config import JobConfig
from plugin.config.flags import option_name
from plugin.config.other_frameworks import loss_config_of
from plugin.errors import ConfigError

pytestmark = pytest.mark.hostile


ICEPOP = "plugin.ppo_utils.icepop_function"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tis_clip": 2.0}, r"--tis-clip 2.0 would do nothing: it needs --use-tis with vanilla"),
        (
            {"use_tis": True, "custom_tis_function_path": ICEPOP, "veto_threshold": 1e-3},
            "needs --use-tis with plugin.ppo_utils.veto_function; add that, or drop --veto-thresh",
        ),
        ({"gamma": 0.9}, "needs --advantage-estimator reinforce_plus_plus"),
        (
            {"advantage_estimator": "rloo", "grpo_std_normalization": False},
            "^--no-grpo-std-normalization would do nothing",
        ),
        ({"apply_chat_template": True}, "needs --prompt-data or --task-path"),
        (
            {"detect_routing": True, "detect_mismatch": False},
            "--detect-routing would do nothing: it needs --detect-mismatch",
        ),
        ({"policy_loss": "icepop", "eps_clip": 0.1}, "needs --policy-loss ppo or gspo or cispo"),
        ({"kl_loss_type": "k3"}, "needs --use-kl-loss"),
        ({"min_lr": 1e-7}, "needs --lr-decay-style linear or cosine"),
        ({"max_turns": 3}, "needs --task-path with a multi-turn task"),
        ({"rollout_request_retries": 1}, "needs --rollout-engine http"),
        ({"wandb_project": "mine"}, "needs --use-wandb"),
        ({"loss_scale": 1024.0}, "needs --train-dtype float16"),
        (
            {"train_dtype": "float16", "loss_scale": 1024.0, "hysteresis": 1},
            "--hysteresis 1 would do nothing: it needs --train-dtype float16 without --loss-scale",
        ),
    ],
)
def test_no_flag_is_silently_without_effect(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig.from_sources(given)
    file = tmp_path / "job.yaml"
    different = {k: v if v != getattr(JobConfig(), k) else v * 2 for k, v in given.items()}
    file.write_text(yaml.safe_dump(different))
    with pytest.raises(ConfigError, match="would do nothing"):
        JobConfig.from_sources({}, file)


def test_no_flag_with_an_effect_is_refused(tmp_path: Path) -> None:
    JobConfig.from_sources({"use_tis": True, "tis_clip": 3.0})
    JobConfig.from_sources({"get_mismatch_metrics": True, "tis_clip": 3.0})
    chain = f"{ICEPOP},plugin.ppo_utils:veto_function"
    JobConfig.from_sources(
        {"use_tis": True, "custom_tis_function_path": chain, "veto_threshold": 1e-3}
    )
    # the user's own code may read any flag
    own = {"use_tis": True, "custom_tis_function_path": "my.hook", "veto_threshold": 1e-3}
    JobConfig.from_sources(own)
    JobConfig.from_sources({"advantage_estimator": "my.estimator", "gamma": 0.9})
    # turned off, or at none
    JobConfig.from_sources({"apply_chat_template": False, "eps_clip_c": None})


def test_no_run_refuses_the_configuration_that_another_has_written(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(JobConfig.from_sources({}).as_dict()))
    JobConfig.from_sources({}, file)


def test_no_namespace_of_another_framework_is_refused_for_its_idle_flags() -> None:
    theirs = Namespace(tis_clip=3.0, use_tis=False, eps_clip=0.1, gamma=0.9, kl_loss_type="k3")
    assert loss_config_of(theirs).tis_clip == 3.0
    assert loss_config_of(Namespace(**vars(theirs), policy_loss="icepop")).eps_clip == 0.1


def test_no_help_names_a_need_that_is_no_flag() -> None:
    known = {option_name(item.name) for item in dataclasses.fields(JobConfig)}
    for item in dataclasses.fields(JobConfig):
        if item.metadata["needs"]:
            words = item.metadata["needs"].what.split()
            assert {word for word in words if word.startswith("--")} <= known, item.name
