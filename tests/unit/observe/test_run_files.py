"""Run files: every step survives a crash, readers skip what is broken, a lost disk never stops a job."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import pytest
import yaml

from plugin.errors import ConfigError
from plugin.observe.metric_table import REQUIRED_METRICS
from plugin.observe.run_files import RunFiles, new_run_dir
from plugin.observe.run_record import read_run
from tests.full_disk import largest_file

CONFIG = {"policy_loss": "ppo", "tis_clip": 2.0, "hf_checkpoint": None, "run_dir": Path("x")}


def test_every_step_is_one_json_object_with_the_required_keys(tmp_path: Path) -> None:
    with RunFiles(tmp_path / "run", CONFIG, tensorboard=False) as files:
        for step in range(3):
            files.log_step({"step": step, "reward": step / 2, "mismatch/k3": 1e-3})
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(set(REQUIRED_METRICS) <= line.keys() for line in lines)
    assert lines[1]["reward"] == 0.5 and lines[1]["grad_norm"] is None
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["tis_clip"] == 2.0


def test_tensorboard_events_hold_the_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunFiles(tmp_path, CONFIG) as files:
        files.log_step({"step": 7, "reward": 0.25, "mismatch/by_position/0/k2": 1.0})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(7, 0.25)]
    assert "mismatch/by_position/0/k2" not in events.Tags()["scalars"]


def test_nan_and_infinity_are_valid_json_and_come_back_as_numbers(tmp_path: Path) -> None:
    with RunFiles(tmp_path, CONFIG, tensorboard=False) as files:
        files.log_step({"step": 0, "loss": float("nan"), "grad_norm": float("inf")})
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    [step] = read_run(tmp_path).steps
    assert math.isnan(step["loss"]) and step["grad_norm"] == math.inf


def test_a_truncated_last_line_is_skipped_and_named(tmp_path: Path) -> None:
    with RunFiles(tmp_path, CONFIG, tensorboard=False) as files:
        files.log_step({"step": 0, "reward": 1.0})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "rew')
    record = read_run(tmp_path)
    assert [step["step"] for step in record.steps] == [0]
    assert "line 2" in record.problems[0]


def test_a_continued_run_starts_on_a_fresh_line_and_its_steps_win(tmp_path: Path) -> None:
    with RunFiles(tmp_path, CONFIG, tensorboard=False) as files:
        files.log_step({"step": 0, "reward": 0.1})
        files.log_step({"step": 1, "reward": 0.2})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "rew')
    with RunFiles(tmp_path, CONFIG, tensorboard=False) as files:
        files.log_step({"step": 1, "reward": 0.9})
        files.log_step({"step": 2, "reward": 0.3})
    record = read_run(tmp_path)
    assert [(step["step"], step["reward"]) for step in record.steps] == [
        (0, 0.1),
        (1, 0.9),
        (2, 0.3),
    ]


def test_a_changed_configuration_keeps_the_earlier_one(tmp_path: Path) -> None:
    RunFiles(tmp_path, CONFIG, tensorboard=False)
    RunFiles(tmp_path, CONFIG, tensorboard=False)
    RunFiles(tmp_path, {**CONFIG, "tis_clip": 3.0}, tensorboard=False)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["tis_clip"] == 3.0
    assert yaml.safe_load((tmp_path / "config.1.yaml").read_text())["tis_clip"] == 2.0
    assert not (tmp_path / "config.2.yaml").exists()


def test_a_lost_disk_costs_one_warning_and_no_exception(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "run", CONFIG, tensorboard=False)
    for path in (tmp_path / "run").iterdir():
        path.unlink()
    (tmp_path / "run").rmdir()
    with pytest.warns(UserWarning, match="training goes on") as caught:
        files.log_step({"step": 0})
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        files.log_step({"step": 1})
        files.log_findings(1, [{"title": "x"}])


def test_a_line_that_the_disk_has_no_room_for_is_not_half_written(tmp_path: Path) -> None:
    files = RunFiles(tmp_path, CONFIG, tensorboard=False)
    files.log_step({"step": 0})
    whole = (tmp_path / "metrics.jsonl").stat().st_size
    with largest_file(whole + 10), pytest.warns(UserWarning, match="File too large"):
        files.log_step({"step": 1})
    files.log_step({"step": 2})
    record = read_run(tmp_path)
    assert [step["step"] for step in record.steps] == [0, 2] and not record.problems


def test_tensorboard_on_a_full_disk_costs_one_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = RunFiles(tmp_path, CONFIG)
    [events] = tmp_path.glob("events.*")
    events.unlink()
    events.mkdir()
    with pytest.warns(UserWarning, match="training goes on without it") as caught:
        for step in range(3):
            files.log_step({"step": step, "reward": 1.0})
        files.close()
    assert len(caught) == 1 and "Traceback" not in capfd.readouterr().err


def test_no_report_and_no_part_of_one_on_a_full_disk_ends_a_job(tmp_path: Path) -> None:
    files = RunFiles(tmp_path, CONFIG, tensorboard=False)
    files.log_step({"step": 0})
    with largest_file(1000), pytest.warns(UserWarning, match="the run has no report: .*too large"):
        assert files.write_report() is None
    assert not list(tmp_path.glob("*.partial"))


def test_a_run_that_a_full_disk_has_no_room_for_is_refused(tmp_path: Path) -> None:
    for settings in ({"name": "too long"}, {}):  # the second fails at TensorBoard's events
        with largest_file(10), pytest.raises(ConfigError, match=r"--run-dir .*File too large"):
            RunFiles(tmp_path, settings)
        assert not list(tmp_path.glob("*.partial"))


def test_an_unwritable_run_directory_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--run-dir .*file/run.*choose another"):
        RunFiles(tmp_path / "file" / "run", CONFIG)


def test_a_step_without_a_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without a step"):
        RunFiles(tmp_path, CONFIG, tensorboard=False).log_step({"reward": 1.0})


def test_new_run_directories_do_not_collide(tmp_path: Path) -> None:
    first = new_run_dir("name", tmp_path)
    first.mkdir()
    assert new_run_dir("name", tmp_path) != first


def test_a_directory_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no metrics\.jsonl"):
        read_run(tmp_path)


def test_evaluations_are_read_apart_from_the_steps_and_taken_back_with_them(tmp_path: Path) -> None:
    with RunFiles(tmp_path, CONFIG, tensorboard=False) as files:
        files.log_evaluation({"step": 0, "rollout": 0, "eval/a/mean": 0.1})
        for step in (1, 2, 3):
            files.log_step({"step": step, "reward": 0.5})
            files.log_evaluation({"step": step, "rollout": step, "eval/a/mean": step / 10})
        # Back to the checkpoint of step 1, whose evaluation stays.
        files.log_step({"step": 2, "reward": 0.6})
    record = read_run(tmp_path)
    assert [(step["step"], step["reward"]) for step in record.steps] == [(1, 0.5), (2, 0.6)]
    assert [line["step"] for line in record.evaluations] == [0, 1]


def test_a_long_history_holds_the_name_of_a_metric_once(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "mismatch/k3": 0.1}) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    first, second = read_run(tmp_path).steps
    assert all(a is b for a, b in zip(first, second, strict=True))
