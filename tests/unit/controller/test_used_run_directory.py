"""A run directory belongs to one run, and to one job at a time."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from plugin.cluster import directory_lock
from plugin.cluster.directory_lock import lock_directory
from plugin.config import JobConfig
from plugin.controller.run_directory import (
    RunCheckpoints,
    check_run_dir,
    claimed_run_dir,
    evaluation_scores,
    find_checkpoint,
)
from plugin.errors import ConfigError
from plugin.megatron_backend.checkpoint.directory import complete_checkpoints, set_aside_later
from plugin.observe.run_files import RunFiles
from plugin.observe.run_record import read_run
from tests.full_disk import largest_file

pytestmark = [pytest.mark.hostile, pytest.mark.usefixtures("jumping_clock")]


def job(run_dir: Path, **settings: Any) -> JobConfig:
    return JobConfig.from_sources({"run_dir": str(run_dir), **settings})


def used_directory(root: Path, steps: int = 3, **settings: Any) -> Path:
    """What a run of some steps leaves, and a file of the user's."""
    run_dir = root / "run"
    with RunFiles(run_dir, job(run_dir, **settings).as_dict(), tensorboard=False) as files:
        for step in range(1, steps + 1):
            files.log_step({"step": step, "reward": 0.1 * step})
    for step in range(1, steps + 1):
        (run_dir / "checkpoints" / f"step_{step:07d}").mkdir(parents=True)
    (run_dir / "checkpoints" / "latest").write_text(f"step_{steps:07d}\n")
    (run_dir / "notes.txt").write_text("mine")
    return run_dir


def test_a_new_run_starts_in_no_directory_that_holds_another(tmp_path: Path) -> None:
    run_dir = used_directory(tmp_path)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl.*--resume.*another.*--overwrite"):
        check_run_dir(run_dir, job(run_dir))
    (run_dir / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="checkpoints"):
        check_run_dir(run_dir, job(run_dir))
    check_run_dir(run_dir, job(run_dir, resume=True))
    check_run_dir(tmp_path / "new", job(tmp_path / "new"))


def test_overwrite_deletes_what_a_run_wrote_and_only_that(tmp_path: Path) -> None:
    run_dir = used_directory(tmp_path, save_hf=True)
    (run_dir / "model").mkdir()
    (run_dir / "model" / "config.json").write_text("{}")
    (run_dir / "checkpoints" / "step_0000009.incomplete").mkdir()
    (run_dir / "checkpoints" / "best").mkdir()
    with claimed_run_dir(run_dir, job(run_dir, overwrite=True)):
        left = {str(path.relative_to(run_dir)) for path in run_dir.rglob("*")}
    assert left == {"notes.txt", "lock", "checkpoints", "checkpoints/best"}


def test_overwrite_keeps_a_model_that_the_run_did_not_write(tmp_path: Path) -> None:
    run_dir = used_directory(tmp_path)
    (run_dir / "model").mkdir()
    (run_dir / "model" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"--save-hf would write to .*model, which is not empty"):
        check_run_dir(run_dir, job(run_dir, overwrite=True, save_hf=True))
    with claimed_run_dir(run_dir, job(run_dir, overwrite=True)):
        assert (run_dir / "model" / "config.json").exists()


def test_models_per_interval_have_a_directory_of_their_own(tmp_path: Path) -> None:
    run_dir = used_directory(tmp_path)
    (run_dir / "models" / "step_0000002").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"--save-hf-interval would write to .*models, which is"):
        check_run_dir(run_dir, job(run_dir, resume=True, save_hf_interval=2))


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_lock, "_DYING_SECONDS", 0.0)


@pytest.mark.usefixtures("no_patience")
def test_a_second_driver_is_refused_and_told_who_holds_the_directory(tmp_path: Path) -> None:
    with (
        claimed_run_dir(tmp_path / "run", job(tmp_path / "run")),
        pytest.raises(ConfigError, match=rf"in use by process {os.getpid()} on .* since 20"),
        claimed_run_dir(tmp_path / "run", job(tmp_path / "run")),
    ):
        pass
    with claimed_run_dir(tmp_path / "run", job(tmp_path / "run")):
        pass


@pytest.mark.usefixtures("no_patience")
@pytest.mark.parametrize("how", [{}, {"resume": True}, {"overwrite": True}])
def test_a_second_driver_is_never_told_to_delete_or_resume_a_run_that_goes_on(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    with claimed_run_dir(tmp_path / "run", job(tmp_path / "run")):
        used_directory(tmp_path)
        with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()} on .* since 20"):
            check_run_dir(tmp_path / "run", job(tmp_path / "run", **how))
    check_run_dir(tmp_path / "run", job(tmp_path / "run", resume=True))


def test_a_directory_whose_holder_is_dying_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_lock, "_DYING_SECONDS", 20.0)
    with claimed_run_dir(tmp_path / "run", job(tmp_path / "run")):
        file = open(tmp_path / "run" / directory_lock.LOCK_FILE, "a+")  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_EX)
    threading.Timer(0.2, file.close).start()
    with claimed_run_dir(tmp_path / "run", job(tmp_path / "run")):
        assert file.closed


def test_a_lock_that_is_a_link_or_a_pipe_is_refused_and_nothing_is_overwritten(
    tmp_path: Path,
) -> None:
    (tmp_path / "notes.txt").write_text("precious")
    (tmp_path / "link").mkdir()
    (tmp_path / "link/lock").symlink_to(tmp_path / "notes.txt")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe/lock")
    for name in ("link", "pipe"):
        with pytest.raises(ConfigError, match="--run-dir"):
            lock_directory(tmp_path / name, "--run-dir").close()
    assert (tmp_path / "notes.txt").read_text() == "precious"


def test_the_lock_of_a_killed_driver_is_no_obstacle(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from pathlib import Path\n"
            "from plugin.cluster.directory_lock import lock_directory\n"
            "held = lock_directory(Path(sys.argv[1]), '--run-dir'); print('held', flush=True)\n"
            "time.sleep(60)",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    with pytest.raises(ConfigError, match=f"process {holder.pid} "):
        lock_directory(tmp_path, "--run-dir")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    lock_directory(tmp_path, "--run-dir").close()


def test_a_directory_on_a_full_disk_is_refused_by_its_flag(tmp_path: Path) -> None:
    error = r"--run-dir .* cannot be written \(File too large\)"
    with largest_file(0), pytest.raises(ConfigError, match=error):
        lock_directory(tmp_path, "--run-dir")


def test_two_runs_do_not_mix_their_dumps(tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    dump.mkdir()
    (dump / "step-000001.parquet").touch()
    (dump / "mine.txt").touch()
    run_dir = used_directory(tmp_path, dump_log_probs=str(dump))
    settings: dict[str, Any] = {"dump_log_probs": str(dump)}
    for config in (
        job(tmp_path / "new", **settings),
        job(tmp_path / "new", resume=True, **settings),
    ):
        with pytest.raises(ConfigError, match=r"--dump-log-probs .* holds the dump of another run"):
            check_run_dir(tmp_path / "new", config)
    check_run_dir(run_dir, job(run_dir, resume=True, **settings))
    with claimed_run_dir(tmp_path / "new", job(tmp_path / "new", overwrite=True, **settings)):
        assert {path.name for path in dump.iterdir()} == {"mine.txt", "lock"}


def test_a_run_goes_back_only_to_checkpoints_it_wrote_or_resumed_from(tmp_path: Path) -> None:
    root = used_directory(tmp_path) / "checkpoints"
    fresh = RunCheckpoints(root)
    assert fresh.newest() is None
    fresh.add(2)
    assert fresh.newest() == root / "step_0000002"
    resumed = RunCheckpoints(root)
    resumed.add_until(root / "step_0000002")
    assert resumed.newest() == root / "step_0000002"
    resumed.add(7)  # a save that was cut off
    assert resumed.newest() == root / "step_0000002"


def test_resume_from_sets_later_checkpoints_aside_and_stays_there(tmp_path: Path) -> None:
    root = used_directory(tmp_path) / "checkpoints"
    chosen = find_checkpoint(root, "step_2")
    assert chosen == root / "step_0000002"
    assert set_aside_later(chosen) == [root / "step_0000003.set_aside"]
    assert [path.name for path in complete_checkpoints(root)] == ["step_0000001", "step_0000002"]
    assert find_checkpoint(root, None) == chosen
    with pytest.raises(
        ConfigError, match=r"step_9.*complete ones there: step_0000001, step_0000002"
    ):
        check_run_dir(root.parent, job(root.parent, resume_from="step_9"))


def test_steps_that_a_run_took_back_do_not_stay_in_its_metrics(tmp_path: Path) -> None:
    run_dir = used_directory(tmp_path)
    with RunFiles(run_dir, {}, tensorboard=False) as files:
        files.log_step({"step": 2, "reward": 0.9})
    assert [(s["step"], s["reward"]) for s in read_run(run_dir).steps] == [(1, 0.1), (2, 0.9)]


def test_a_broken_config_stops_a_resume_with_one_line_that_names_it(tmp_path: Path) -> None:
    run_dir = used_directory(tmp_path)
    for text in ("lr: [1,\n  - }", "- 1\n- 2\n", "a: " + "[" * 600):
        (run_dir / "config.yaml").write_text(text)
        with pytest.raises(ConfigError) as caught:
            check_run_dir(run_dir, job(run_dir, resume=True))
        message = str(caught.value)
        assert str(run_dir / "config.yaml") in message and "\n" not in message
    (run_dir / "config.yaml").write_bytes(b"lr: \xff")
    with pytest.raises(ConfigError, match=r"config\.yaml: not valid YAML"):
        check_run_dir(run_dir, job(run_dir, resume=True))


def test_a_deeply_nested_line_of_metrics_is_skipped_and_named(tmp_path: Path) -> None:
    run_dir = used_directory(tmp_path, steps=1)
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "reward": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    record = read_run(run_dir)
    assert [step["step"] for step in record.steps] == [1]
    [problem] = record.problems
    assert problem.startswith(f"{run_dir / 'metrics.jsonl'}: line 2 ") and "\n" not in problem


@pytest.mark.parametrize("damage", ["", "step_0000003\n", None])
def test_a_damaged_marker_never_costs_the_best_checkpoint(
    tmp_path: Path, damage: str | None
) -> None:
    run_dir = used_directory(tmp_path, eval_data=["a:1"], keep_best=True, save_interval=1)
    root, marker = run_dir / "checkpoints", run_dir / "checkpoints" / "best"
    records = [
        {"step": step, "rollout": step, "eval/a/mean": score}
        for step, score in enumerate((0.9, 0.2, 0.7, 0.7, 0.1))
    ]
    scores = evaluation_scores(job(run_dir, eval_data=["a:1"]), records)
    assert scores == {1: 0.2, 2: 0.7, 3: 0.7, 4: 0.1}  # not the initial weights
    run = RunCheckpoints(root)
    for step in (1, 2, 3):
        run.add(step)
    run.mark_best(2)
    assert run.repair_best(scores) is None
    marker.unlink() if damage is None else marker.write_text(damage)
    assert "the best is step_0000002" in (run.repair_best(scores) or "")
    assert run.best() == root / "step_0000002" and run.repair_best(scores) is None
    # An evaluation that was lost is no reason to call another checkpoint the best.
    assert run.repair_best({1: 0.2}) is None and run.best() == root / "step_0000002"
    # A command goes by the evaluations as well.
    marker.write_text("")
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    assert find_checkpoint(root, "best") == root / "step_0000002"
