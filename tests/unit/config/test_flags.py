"""Flags, YAML keys and values: one source, merged before validation."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from plugin.config import FlagGroup, JobConfig, LossConfig, flag
from plugin.errors import ConfigError


def parse(*words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    LossConfig.add_arguments(parser)
    return vars(parser.parse_args(words))


def test_what_the_user_leaves_out_is_absent_and_takes_the_default() -> None:
    assert parse() == {}
    assert LossConfig.from_sources(parse()) == LossConfig()


def test_every_field_has_a_flag_and_a_help_text() -> None:
    parser = argparse.ArgumentParser()
    LossConfig.add_arguments(parser)
    help_text = parser.format_help()
    for item in dataclasses.fields(LossConfig):
        assert "--" + item.name.replace("_", "-") in help_text, item.name
        assert item.metadata["help"]


def test_the_defaults_are_the_documented_contract() -> None:
    c = LossConfig()
    assert (c.policy_loss, c.eps_clip, c.clip_high, c.eps_clip_c) == ("ppo", 0.2, 0.2, None)
    assert (c.use_tis, c.tis_clip, c.tis_clip_low) == (False, 2.0, 0.0)
    assert c.hook_names() == ["plugin.ppo_utils.vanilla_tis_function"]
    assert (c.icepop_ratio_low, c.icepop_ratio_high) == (0.2, 5.0)
    assert (c.dppo_diff_low, c.dppo_diff_high, c.dppo_mask_low, c.dppo_mask_high) == (0.2,) * 4
    assert (c.ipo_ratio_low, c.ipo_ratio_high) == (0.2, 5.0)
    assert (c.kl_tau, c.adv_tau, c.teacher_tau) == (1e-3, 1.0, 0.0)
    assert (c.use_rollout_kl_loss, c.rollout_kl_loss_coef) == (False, 0.0)
    assert (c.rollout_kl_estimator_type, c.rollout_kl_scope) == ("k2", "all")
    assert (c.use_kl_loss, c.kl_loss_coef, c.kl_loss_type) == (False, 0.0, "k1")
    assert (c.use_unbiased_kl, c.entropy_coef) == (False, 0.0)
    assert (c.advantage_estimator, c.loss_denominator) == ("grpo", "original")
    assert (c.train_log_probs, c.get_mismatch_metrics) == ("recompute", False)


def test_flags_are_parsed_and_converted() -> None:
    found = parse(
        *("--policy-loss", "icepop", "--eps-clip", "3e-4", "--use-kl-loss"),
        *("--no-calculate-per-token-loss", "--eps-clip-high", "none"),
    )
    config = LossConfig.from_sources(found)
    assert config.policy_loss == "icepop" and config.eps_clip == 3e-4 and config.use_kl_loss
    assert config.loss_reduction == "sample-mean" and config.eps_clip_high is None


def test_yaml_gives_values_and_flags_override_them(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    # PyYAML reads 1e-3 as a string; both spellings of a key are fine
    file.write_text("eps-clip: 1e-3\ntis_clip: 4\nuse-tis: true\neps_clip_c: none\n")
    config = LossConfig.from_sources({"tis_clip": "3.0"}, file)
    assert (config.eps_clip, config.tis_clip, config.use_tis) == (1e-3, 3.0, True)
    assert isinstance(config.tis_clip, float) and config.eps_clip_c is None


def test_an_empty_yaml_file_is_fine(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("# nothing\n")
    assert LossConfig.from_sources({}, file) == LossConfig()


@pytest.mark.parametrize(
    "text, message",
    [
        ("tis_clipp: 3", "unknown setting 'tis_clipp'; did you mean 'tis_clip'"),
        ("zzzzzz: 3", "unknown setting 'zzzzzz'; `megatron-tis train --help-all` lists"),
        ("- a\n- b", "expected a mapping"),
        ("1: 2", "expected a mapping"),
        ("a: [", "not valid YAML"),
        ("tis_clip: -1", "--tis-clip is -1.0; it must be greater than 0"),
        ("tis_clip: .inf", "a finite number"),
        ("tis_clip: .nan", "a finite number"),
        ("tis_clip: true", "expected float"),
        ("tis_clip: [1]", "expected float"),
        ("tis_clip:", "--tis-clip is none; give a value"),
        ("use_tis: 1", "expected bool .true or false"),
        ("use_tis: 'yes please'", "expected bool"),
        ("policy_loss: ppoo", "--policy-loss is 'ppoo'; choose one of ppo, reinforce"),
        ("policy_loss: [ppo]", "choose one of"),
        ("custom_tis_function_path: 3", "expected str"),
        ("custom_tis_function_path: [a.b]", "expected str"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
    ],
)
def test_a_yaml_file_passes_the_same_checks_as_the_command_line(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        LossConfig.from_sources({}, file)


def test_a_yaml_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read .No such file"):
        LossConfig.from_sources({}, tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        LossConfig.from_sources({}, tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ConfigError, match="not valid YAML"):
        LossConfig.from_sources({}, binary)


def test_one_setting_in_two_spellings_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text("tis-clip: 3\ntis_clip: 4\n")
    with pytest.raises(ConfigError, match="tis_clip is given twice"):
        LossConfig.from_sources({}, file)


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LossConfig().tis_clip = 3.0  # type: ignore[misc]


def test_a_written_configuration_reads_back_equal(tmp_path: Path) -> None:
    import yaml

    config = LossConfig(policy_loss="icepop", eps_clip=3e-4, eps_clip_c=3.0)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.as_dict()))
    assert LossConfig.from_sources({}, file) == config


def test_a_namespace_gives_the_fields_it_has() -> None:
    args = argparse.Namespace(tis_clip=3.0, something_else=1)
    assert LossConfig.from_namespace(args) == LossConfig(tis_clip=3.0)
    config = LossConfig()
    assert LossConfig.from_namespace(config) is config


@dataclasses.dataclass(frozen=True)
class _Numbers(FlagGroup):
    title = "numbers"
    count: int = flag(1, "a 100% help text", at_least=1)


def test_integers_stay_exact_and_refuse_fractions() -> None:
    assert _Numbers(count="12").count == 12  # type: ignore[arg-type]
    assert _Numbers(count=2.0).count == 2  # type: ignore[arg-type]
    assert _Numbers(count="9007199254740993").count == 2**53 + 1  # type: ignore[arg-type]
    for bad in (1.5, "1.5", "many", 0, True):
        with pytest.raises(ConfigError, match="--count is"):
            _Numbers(count=bad)  # type: ignore[arg-type]


def test_a_percent_sign_in_a_help_text_does_not_break_help() -> None:
    parser = argparse.ArgumentParser()
    _Numbers.add_arguments(parser)
    assert "a 100% help text (default: 1)" in parser.format_help()


def test_a_job_configuration_runs_the_checks_of_the_loss_too() -> None:
    with pytest.raises(ConfigError, match="--tis-clip-low"):
        JobConfig.from_sources({"tis_clip_low": 5.0})


def test_a_flag_for_numbers_may_take_a_word() -> None:
    assert JobConfig.from_sources({}).threads_per_rank == "auto"
    assert JobConfig.from_sources({"threads_per_rank": "3"}).threads_per_rank == 3
    with pytest.raises(ConfigError, match="--threads-per-rank is 'many'; expected int or auto"):
        JobConfig.from_sources({"threads_per_rank": "many"})
    with pytest.raises(ConfigError, match="--threads-per-rank is 0; it must be at least 1"):
        JobConfig.from_sources({"threads_per_rank": 0})


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ((), False),
        (("--use-rollout-routing-replay",), "ids"),
        (("--use-rollout-routing-replay", "--seed", "3"), "ids"),
        (("--use-rollout-routing-replay", "ids"), "ids"),
        (("--use-rollout-routing-replay=ids+weights",), "ids+weights"),
        (("--no-use-rollout-routing-replay",), False),
    ],
)
def test_a_switch_with_choices_goes_on_being_a_switch(words: tuple[str, ...], value: Any) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    JobConfig.add_arguments(parser)
    config = JobConfig.from_sources(vars(parser.parse_args(words)))
    assert config.use_rollout_routing_replay == value
    # As in a written configuration, in YAML (true, false) and in another framework's namespace.
    assert JobConfig(use_rollout_routing_replay=value) == JobConfig(
        use_rollout_routing_replay={"ids": True}.get(value, value)
    )


def test_a_switch_with_choices_refuses_other_values() -> None:
    for value in ("weights", "on", 1, "true"):
        with pytest.raises(ConfigError, match=r"choose one of ids, ids\+weights, or false"):
            JobConfig(use_rollout_routing_replay=value)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    JobConfig.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--no-use-rollout-routing-replay", "ids+weights"])


def test_weights_of_routes_are_asked_of_engines_that_report_them() -> None:
    both = {"use_rollout_routing_replay": "ids+weights"}
    assert JobConfig(**both).wants_route_weights
    assert not JobConfig(use_rollout_routing_replay=True).wants_route_weights
    dumped = {"detect_routing": True, "dump_routes": True, "dump_log_probs": "dumps"}
    assert JobConfig(**dumped).wants_route_weights
    assert not JobConfig(**dumped, rollout_engine="vllm").wants_route_weights
    with pytest.raises(ConfigError, match="reports the experts of a token and not their weights"):
        JobConfig(**both, rollout_engine="vllm")
    with pytest.raises(ConfigError, match=r"it needs --use-rollout-routing-replay ids\+weights"):
        JobConfig.from_sources({"router_gradient": "keep", "use_rollout_routing_replay": True})
    with pytest.raises(ConfigError, match="--dump-routes would do nothing"):
        JobConfig.from_sources({"dump_routes": True, "dump_log_probs": "dumps"})


def test_an_alias_sets_the_flag_it_is_a_spelling_of_and_is_not_stored(tmp_path: Path) -> None:
    found = LossConfig.from_sources(parse("--calculate-per-token-loss", "--use-rollout-logprobs"))
    assert (found.loss_reduction, found.train_log_probs) == ("token-mean", "rollout")
    assert found == LossConfig(loss_reduction="token-mean", train_log_probs="rollout")
    assert not {"calculate_per_token_loss", "use_rollout_logprobs"} & found.as_dict().keys()
    assert dataclasses.replace(found, loss_reduction="group-mean").reduction == "group-mean"
    foreign = argparse.Namespace(policy_loss="ppo", use_rollout_logprobs=True)
    assert LossConfig.from_namespace(foreign).train_log_probs == "rollout"
    file = tmp_path / "job.yaml"
    file.write_text("calculate-per-token-loss: false\nuse_rollout_logprobs: none\n")
    found = LossConfig.from_sources({}, file)
    assert (found.loss_reduction, found.train_log_probs) == ("sample-mean", "recompute")


@pytest.mark.parametrize(
    "text, flags, expected",
    [
        ("loss_reduction: token-mean", ["--no-calculate-per-token-loss"], "sample-mean"),
        ("calculate_per_token_loss: true", ["--loss-reduction", "group-mean"], "group-mean"),
        ("loss_reduction: prompt-mean", ["--no-calculate-per-token-loss"], "prompt-mean"),
        ("train_log_probs: rollout", ["--no-use-rollout-logprobs"], "recompute"),
        ("train_log_probs: approximate", ["--use-rollout-logprobs"], "rollout"),
        ("{train_log_probs: rollout, use_rollout_logprobs: false}", [], "rollout"),
    ],
)
def test_an_alias_on_the_command_line_wins_over_the_flag_in_a_file(
    tmp_path: Path, text: str, flags: list[str], expected: str
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    config = LossConfig.from_sources(parse(*flags), file)
    assert expected in (config.loss_reduction, config.train_log_probs)


@pytest.mark.parametrize(
    "text, message",
    [
        ("calculate_per_token_loss: 1", "--calculate-per-token-loss is 1; expected bool"),
        ("{use_rollout_logprobs: true, train_log_probs: approximate}", "two different values"),
        ("{calculate_per_token_loss: false, loss_reduction: token-mean}", "--no-calculate-per"),
    ],
)
def test_an_alias_that_contradicts_its_flag_or_is_no_switch_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        LossConfig.from_sources({}, file)
