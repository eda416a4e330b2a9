"""The detectors as a job runs them: findings in a file, news on the screen, silence on clean data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plugin.config import JobConfig
from plugin.controller.step_records import MismatchWatch
from plugin.errors import FindingError
from plugin.observe.run_files import RunFiles
from plugin.observe.run_record import read_run
from tests.unit.observe.test_detectors import LANGUAGE, Language, rollout, routes


def watch(
    tmp_path: Path,
    columns: dict,
    steps: int = 3,
    live_routes: list | None = None,
    **settings: object,
) -> tuple[list[str], list[dict]]:
    """What is said and what is written over some steps with the same columns."""
    said: list[str] = []
    with RunFiles(tmp_path, {}, tensorboard=False) as files:
        detectors = MismatchWatch(JobConfig(**settings), files, said.append)
        for step in range(1, steps + 1):
            detectors.check(step, columns, 0, live_routes)
    file = tmp_path / "findings.jsonl"
    return said, [json.loads(line) for line in file.open()] if file.exists() else []


def test_a_fault_is_written_at_every_step_and_said_once(tmp_path: Path) -> None:
    columns = rollout(LANGUAGE, LANGUAGE)
    shifted = [values.roll(1) for values in columns["rollout_log_probs"]]
    said, written = watch(tmp_path, {**columns, "rollout_log_probs": shifted})
    assert len(said) == 1 and said[0].startswith("step 1: error:")
    assert [line["detector"] for line in written] == ["one_token_shift"] * 3
    assert [line["step"] for line in written] == [1, 2, 3]


def test_an_unmistakable_finding_ends_the_job_before_anything_else_is_said(tmp_path: Path) -> None:
    columns = rollout(Language(seed=5), LANGUAGE)
    said: list[str] = []
    with RunFiles(tmp_path, {}, tensorboard=False) as files:
        job = MismatchWatch(JobConfig(), files, said.append)
        with pytest.raises(FindingError, match="step 1: the engine runs a different model"):
            job.check(1, columns, 0)
    assert said == []
    assert [line["detector"] for line in read_run(tmp_path).findings] == ["another_model"]


def test_it_is_a_warning_like_others_where_the_user_wants_that(tmp_path: Path) -> None:
    columns = rollout(Language(seed=5), LANGUAGE)
    said, written = watch(tmp_path, columns, on_finding="warn")
    assert len(said) == 1 and said[0].startswith("step 1: error: the engine runs a different")
    assert len(written) == 3


def test_clean_steps_are_silent(tmp_path: Path) -> None:
    assert watch(tmp_path, rollout(LANGUAGE, LANGUAGE)) == ([], [])


def test_it_can_be_turned_off_and_does_without_rollout_log_probs(tmp_path: Path) -> None:
    columns = rollout(LANGUAGE, LANGUAGE)
    zeros = [values * 0 for values in columns["rollout_log_probs"]]
    broken = {**columns, "rollout_log_probs": zeros}
    assert watch(tmp_path / "off", broken, detect_mismatch=False) == ([], [])
    del columns["rollout_log_probs"]
    assert watch(tmp_path / "without", columns) == ([], [])


def test_the_trainers_own_routes_are_compared_with_the_engines(tmp_path: Path) -> None:
    columns = {**rollout(LANGUAGE, LANGUAGE), "rollout_routed_experts": routes(0)}
    assert watch(tmp_path / "same", columns, live_routes=routes(0)[:2]) == ([], [])
    swapped = [route[:, [1, 0, 2, 3]] for route in routes(0)[:2]]
    said, written = watch(tmp_path / "swapped", columns, live_routes=swapped)
    assert len(said) == 1 and "layer 0 with 1, 1 with 0" in said[0]
    assert [line["detector"] for line in written] == ["routing"] * 3
