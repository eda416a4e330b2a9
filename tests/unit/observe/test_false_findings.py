"""Findings: none that the settings explain, no advice to turn on what is on, one entry per kind."""

from __future__ import annotations

from typing import Any

import pytest

from plugin.config import JobConfig
from plugin.observe.detectors import MismatchDetectors
from plugin.observe.findings import Finding
from plugin.observe.run_record import group_findings, steps_text
from tests.unit.observe.test_detectors import LANGUAGE, Language, rollout, routes

pytestmark = pytest.mark.hostile


ASYNC = {"async_rollouts": True, "max_weight_staleness": 4}
CORRECTED = {"use_tis": True}
INSISTS = {"allow_biased_correction": True}


def found(columns: dict[str, Any], version: int, **settings: Any) -> list[Finding]:
    detectors = MismatchDetectors(config=JobConfig(**settings))
    return detectors.check(columns, step=0, trainer_version=version)


def test_a_policy_that_became_sharper_since_is_not_called_another_temperature() -> None:
    sharper = Language()
    sharper.logits = LANGUAGE.logits * 1.15
    columns = rollout(LANGUAGE, sharper)
    assert [f.detector for f in found(columns, 0)] == ["temperature"], "sampled by these weights"
    assert found(columns, 2, **ASYNC, **CORRECTED) == []


def test_another_temperature_is_still_found_among_old_samples() -> None:
    columns = rollout(LANGUAGE, LANGUAGE, temperature=0.7)
    columns["weight_versions"] = [2] * 32 + [0] * 96
    assert [f.detector for f in found(columns, 2, **ASYNC, **CORRECTED)] == ["temperature"]


def test_engines_that_run_ahead_as_allowed_are_not_called_frozen() -> None:
    detectors = MismatchDetectors(config=JobConfig(**ASYNC, **CORRECTED))
    columns = rollout(LANGUAGE, LANGUAGE)
    said = [
        [f.detector for f in detectors.check(columns, step=i, trainer_version=i)] for i in range(6)
    ]
    assert said == [[]] * 5 + [["staleness", "frozen_weights"]]


def test_weights_one_version_old_are_not_called_different() -> None:
    columns = rollout(LANGUAGE.perturbed(0.1), LANGUAGE)
    assert found(columns, 1, async_rollouts=True, **CORRECTED) == []


def test_staleness_that_is_allowed_and_corrected_is_no_finding() -> None:
    columns = rollout(LANGUAGE.perturbed(0.3), LANGUAGE)
    assert found(columns, 3, **ASYNC, **CORRECTED) == []
    [finding] = found(columns, 3, **ASYNC, **INSISTS)
    assert "--use-tis" in finding.what_to_try


@pytest.mark.parametrize(
    "settings", [{}, {"rollout_quantization": "int8"}, CORRECTED, {"policy_loss": "icepop"}]
)
def test_advice_never_recommends_what_is_on(settings: dict[str, Any]) -> None:
    faults = [
        rollout(LANGUAGE, LANGUAGE, temperature=0.7),
        rollout(LANGUAGE, LANGUAGE, top_p=0.9),
        rollout(LANGUAGE.perturbed(0.03), LANGUAGE),
    ]
    for columns in faults:
        [finding] = found(columns, 0, **settings)
        advice = finding.what_to_try
        assert "top_p 1" not in advice and "set --rollout-temperature" not in advice
        assert "--use-tis" not in advice or not JobConfig(**settings).corrects_mismatch
        if "rollout_quantization" in settings and finding.detector == "different_weights":
            assert "--rollout-quantization int8" in finding.likely_cause
            assert "weight sync" not in advice


def test_a_mismatch_worth_correcting_is_said_once_and_only_without_a_correction() -> None:
    # noise of 6 % of the log-prob, of a random sign: no fault explains it; k3 is about (0.06 x 1.5)^2 / 2
    noisy = [rollout(LANGUAGE, LANGUAGE, noise=0.06, seed=seed) for seed in range(4)]

    def said(**settings: Any) -> list[list[str]]:
        detectors = MismatchDetectors(config=JobConfig(**settings))
        return [
            [f.detector for f in detectors.check(columns, step=i, trainer_version=0)]
            for i, columns in enumerate(noisy)
        ]

    assert said() == [["uncorrected"], [], [], []]
    for corrected in (CORRECTED, {"policy_loss": "icepop"}, {"use_rollout_logprobs": True}):
        assert said(**corrected) == [[]] * 4
    masks_only = {"use_tis": True, "custom_tis_function_path": "plugin.ppo_utils.opsm_function"}
    assert said(**masks_only) == [["uncorrected"], [], [], []]
    [finding] = found(noisy[0], 0, **masks_only)
    assert "--use-tis" not in finding.what_to_try and "vanilla_tis" in finding.what_to_try
    assert found(rollout(LANGUAGE, LANGUAGE), 0) == []


def test_replay_is_not_recommended_where_routes_are_replayed() -> None:
    swapped = [route[:, [1, 0, 2, 3]] for route in routes(0)]
    columns = rollout(LANGUAGE, LANGUAGE)
    columns |= {"rollout_routed_experts": routes(0), "train_routed_experts": swapped}
    [finding] = found(columns, 0, detect_routing=True)
    assert "--use-rollout-routing-replay" in finding.what_to_try
    [finding] = found(columns, 0, use_rollout_routing_replay=True)
    assert "--use-rollout-routing-replay" not in finding.what_to_try


def test_a_finding_of_many_steps_is_one_entry() -> None:
    def record(step: int, detector: str, severity: str) -> dict[str, Any]:
        return {"step": step, "detector": detector, "title": detector, "severity": severity}

    old = [record(step, "staleness", "warning") for step in range(3, 61)]
    grouped = group_findings([*old, record(26, "temperature", "error"), old[-1]])
    assert [entry["detector"] for entry in grouped] == ["temperature", "staleness"]
    assert [steps_text(entry) for entry in grouped] == ["step 26", "steps 3 to 60, 58 times"]
