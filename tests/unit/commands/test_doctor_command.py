"""`megatron-tis doctor`: what it checks, how it judges layouts, and its exit code."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from plugin.commands import doctor as doctor_command
from plugin.errors import ConfigError
from plugin.tools.doctor import layout_agreement
from plugin.tools.doctor.checks import configuration_checks, environment_checks
from plugin.tools.doctor.layout_agreement import LayoutResult, default_layouts, parse_layout


def doctor(*words: str) -> int:
    parser = argparse.ArgumentParser()
    doctor_command.add_arguments(parser)
    return doctor_command.run(parser.parse_args(list(words)))


def test_this_machine_passes_the_environment_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--layouts", "none", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    names = {check["name"] for check in report["checks"]}
    assert {"torch", "megatron-core", "devices", "transformer engine", "process groups"} <= names
    assert {"routing replay", "hook", "configuration"} <= names
    assert report["healthy"] and report["layouts"] == []


def test_a_hook_that_does_not_load_fails_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--custom-tis-function-path", "no.such.module.fn") == 1
    printed = capsys.readouterr().out
    assert "fail  hook" in printed and "no.such.module" in printed
    assert "running a small model" not in printed


def test_a_bad_configuration_fails_with_the_rule_it_breaks(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("policy_loss: icepop\nuse_tis: true\n")
    [check] = configuration_checks(str(file))
    assert check.name == "configuration"
    assert check.status == "fail" and "--use-tis with --policy-loss icepop" in check.detail


def test_an_old_or_missing_package_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = {"torch": ("99.0", True, "all"), "no-such-package": (None, True, "tests")}
    monkeypatch.setattr("plugin.tools.doctor.checks._PACKAGES", wanted)
    checks = {check.name: check for check in environment_checks(None)}
    assert checks["torch"].status == "fail" and "99.0" in checks["torch"].fix
    assert checks["no-such-package"].status == "fail"


def test_layout_names_are_understood() -> None:
    spec = parse_layout("tp2pp2vpp2")
    assert spec.sizes == {"tp": 2, "pp": 2, "vpp": 2} and spec.ranks == 4
    assert parse_layout("dp2tp2sp").ranks == 4 and parse_layout("dp2tp2sp").sequence_parallel
    assert parse_layout("ep2").ranks == 2 and parse_layout("ep2").family == "qwen3_moe"
    assert parse_layout("tp2ep2sp").ranks == 2
    for wrong in ("", "tp", "2tp", "tp2x", "sp", "tp0", "vpp2"):
        with pytest.raises(ConfigError, match="--layouts"):
            parse_layout(wrong)


def test_only_layouts_that_fit_are_tried_by_default() -> None:
    assert {spec.ranks for spec in default_layouts(2)} == {2}
    assert "tp2pp2" in {spec.name for spec in default_layouts(4)}
    assert default_layouts(1) == []


def judged(**changes: float) -> LayoutResult:
    reference = LayoutResult("one process", 1, loss=0.5, grad_norm=2.0, log_probs=[-1.0, -2.0])
    values = {"loss": 0.5, "grad_norm": 2.0, "log_prob": -2.0} | changes
    result = LayoutResult(
        "tp2",
        2,
        loss=values["loss"],
        grad_norm=values["grad_norm"],
        log_probs=[-1.0, values["log_prob"]],
    )
    layout_agreement._judge(result, reference)
    return result


def test_a_layout_agrees_only_if_loss_gradient_norm_and_log_probs_do() -> None:
    assert judged(loss=0.500001).agrees
    assert not judged(loss=0.51).agrees
    assert not judged(grad_norm=4.0).agrees
    assert not judged(log_prob=-2.01).agrees
    assert not judged(grad_norm=float("nan")).agrees
    assert "DISAGREES" in str(judged(grad_norm=4.0))


def test_a_layout_without_a_result_is_a_failure(tmp_path: Path) -> None:
    result = layout_agreement._collected(tmp_path, 0, parse_layout("tp2"))
    assert result.error and not result.agrees
    assert str(result).startswith("fail  tp2")
