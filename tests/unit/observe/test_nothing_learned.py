"""A run that learns nothing says so, in the terminal and in the report, and does not end with 0."""

from __future__ import annotations

import argparse
import io
import json
import math
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from plugin.cluster import ray_cluster
from plugin.commands import train as train_command
from plugin.config import JobConfig
from plugin.controller import job
from plugin.controller.job import JobResult
from plugin.errors import FindingError, TrainingError
from plugin.observe.console import Console
from plugin.observe.findings import Finding
from plugin.observe.html_report import report_html
from plugin.observe.learning import any_step_applied, learning_findings
from plugin.observe.run_files import RunFiles
from plugin.observe.run_record import read_run

pytestmark = pytest.mark.hostile


SOUND = {
    "reward": 0.5,
    "reward_std": 0.4,
    "uniform_group_share": 0.2,
    "num_tokens": 96.0,
    "mismatch/kept_share": 1.0,
    "grad_norm": 0.3,
    "skipped": 0.0,
}
IDLE = {
    "steps are skipped": {"grad_norm": math.nan, "skipped": 1.0},
    "every token is masked": {"num_tokens": 0.0, "grad_norm": 0.0},
    "rejects every token": {"mismatch/kept_share": 0.0, "grad_norm": 0.0},
    "all rewards are equal": {"uniform_group_share": 1.0, "reward": 0.0, "grad_norm": 0.0},
    "the gradient is 0": {"grad_norm": 0.0},
}


def steps(*changes: dict[str, float]) -> list[dict[str, Any]]:
    return [{"step": i + 1, **SOUND, **change} for i, change in enumerate(changes)]


@pytest.mark.parametrize("title", IDLE)
def test_a_run_that_learned_nothing_is_not_called_a_success(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    history = steps(IDLE[title], IDLE[title])
    assert not any_step_applied(history)
    ended = JobResult(tmp_path, history)
    monkeypatch.setattr(job, "run_job", lambda *_: ended)
    monkeypatch.setattr(ray_cluster, "cluster", lambda *_: nullcontext(lambda: None))
    assert train_command.run(argparse.Namespace()) == 1
    printed = capsys.readouterr().out
    assert "error: nothing is learned" in printed and title in printed

    with RunFiles(tmp_path / "run", {}, tensorboard=False) as files:
        for line in history:
            files.log_step(line)
    page = report_html([read_run(tmp_path / "run")])
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert data and title in json.loads(data.group(1))["findings"][0]["title"]


def test_a_job_that_an_unmistakable_finding_ends_says_that_first_and_gives_no_advice_on_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_job(_config: Any, _console: Any, _connected: Any, ended: Any, _begun: Any) -> None:
        equal = IDLE["all rewards are equal"]
        ended(JobResult(tmp_path, steps(equal), checkpoint=tmp_path / "step_1"))
        raise FindingError("step 1: the engine runs a different model")

    monkeypatch.setattr(job, "run_job", run_job)
    monkeypatch.setattr(ray_cluster, "cluster", lambda *_: nullcontext(lambda: None))
    printed = io.StringIO()
    monkeypatch.setattr(train_command, "Console", lambda: Console(printed, printed))
    assert train_command.run(argparse.Namespace()) == 1
    lines = [line for line in printed.getvalue().splitlines() if line]
    del lines[0]  # how long torch took to load
    assert lines[0] == "error: step 1: the engine runs a different model"
    assert lines[1].startswith("reward 0.000") and "nothing is learned" not in printed.getvalue()


def test_a_job_that_went_on_with_one_names_it_before_what_was_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Finding("another model", "error", "k3 3.4", "a head", "bisect", unmistakable=True)
    with RunFiles(tmp_path, {}, tensorboard=False) as files:
        files.log_findings(1, [found])
    ended = JobResult(tmp_path, steps(IDLE["all rewards are equal"]))
    monkeypatch.setattr(job, "run_job", lambda *_: ended)
    monkeypatch.setattr(ray_cluster, "cluster", lambda *_: nullcontext(lambda: None))
    train_command.run(argparse.Namespace())
    printed = capsys.readouterr().out
    assert 0 < printed.index("error: another model (step 1)") < printed.index("nothing is learned")


def test_a_job_that_ends_in_an_error_still_says_how_far_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_job(_config: Any, _console: Any, _connected: Any, ended: Any, _begun: Any) -> None:
        idle = {"skipped": 1.0, "skipped_steps": 2}
        ended(JobResult(tmp_path, steps({}, idle, idle), checkpoint=tmp_path / "step_1"))
        raise TrainingError("the last 2 steps were skipped")

    monkeypatch.setattr(job, "run_job", run_job)
    monkeypatch.setattr(ray_cluster, "cluster", lambda *_: nullcontext(lambda: None))
    assert train_command.run(argparse.Namespace()) == 1
    printed = capsys.readouterr()
    assert "in 3 steps, 2 of them skipped; report:" in printed.out
    assert f"weights: {tmp_path / 'step_1'}" in printed.out and "--resume\n" in printed.out
    assert "error: the last 2 steps were skipped" in printed.err


def test_some_idle_steps_are_no_finding_and_many_are_a_warning() -> None:
    idle = IDLE["all rewards are equal"]
    assert learning_findings(steps(idle, {}, {}, {})) == []
    [finding] = learning_findings(steps(idle, idle, idle, {}))
    assert finding.severity == "warning" and "3 had equal rewards" in finding.evidence
    assert any_step_applied(steps(idle, idle, {}))


def test_equal_rewards_of_a_group_are_no_fault_of_an_estimator_without_groups() -> None:
    uniform = {"uniform_group_share": 1.0}
    config = JobConfig(advantage_estimator="reinforce_plus_plus", n_samples_per_prompt=1)
    assert learning_findings(steps(uniform, uniform), config) == []
    assert learning_findings(steps(uniform, uniform), JobConfig()) != []


def test_responses_that_are_cut_off_are_named_where_all_rewards_are_equal() -> None:
    change = {**IDLE["all rewards are equal"], "truncated_share": 0.9}
    [finding] = learning_findings(steps(change))
    assert "the reward is always 0" in finding.likely_cause
    assert "90%" in finding.what_to_try and "--max-response-length" in finding.what_to_try


def test_the_summary_says_how_many_steps_were_skipped(tmp_path: Path) -> None:
    history = steps({}, {**IDLE["steps are skipped"], "skipped_steps": 1.0})
    stream = io.StringIO()
    ended = JobResult(tmp_path, history)
    assert train_command._summarize(ended, JobConfig(), Console(stream))
    assert "in 2 steps, 1 of them skipped" in stream.getvalue()
