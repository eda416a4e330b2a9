"""Processes that are killed between any two calls which change files leave something whole behind.

A forked child does the work and kills itself at its n-th call (Python's audit events, and fsync), for n from 1 until
it gets through. Whoever continues must then find what was there before, or what was being written.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import Qwen3Config

from plugin.megatron_backend.checkpoint import directory as checkpoints
from plugin.megatron_backend.hf_weights.export import _Writer
from plugin.megatron_backend.hf_weights.files import HfDirectory
from plugin.observe.run_files import RunFiles
from plugin.observe.run_record import read_run

CALLS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate")
MOST_CALLS = 400


def killed_everywhere(directory: Path, work: Callable[[], None]) -> Iterator[int]:
    """Runs `work` in a child again and again, killed one call later each time; yields the number of that call.

    Only calls on files below `directory` count. The caller undoes what the child did.
    """
    for number in range(1, MOST_CALLS):
        child = os.fork()
        if child == 0:
            _work_until(directory, work, number)
        status = os.waitpid(child, 0)[1]
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, f"the work failed before call {number}"
            return
        yield number
    raise AssertionError("the work never ends")


def _work_until(directory: Path, work: Callable[[], None], number: int) -> None:
    left = number

    def count(where: Any) -> None:
        nonlocal left
        if isinstance(where, int):
            with contextlib.suppress(OSError):
                where = os.readlink(f"/proc/self/fd/{where}")
        if str(where).startswith(str(directory)):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CALLS:
            count(arguments[0])

    sync = os.fsync
    os.fsync = lambda descriptor: (count(descriptor), sync(descriptor))[1]
    sys.addaudithook(audit)
    try:
        work()
    except BaseException:
        os._exit(1)
    os._exit(0)


def save(root: Path, step: int, keep: int = 2) -> None:
    """A checkpoint with one file, as a rank writes it."""
    draft = checkpoints.begin(root, step, keep)
    (draft / "weights").write_text(f"weights of step {step}")
    checkpoints.write_json(draft / checkpoints.USER_STATE_FILE, {"step": step})
    names = ["weights", checkpoints.USER_STATE_FILE]
    metadata = checkpoints.CheckpointMetadata(
        step=step,
        trainer_version=step,
        skipped_steps=0,
        optimizer_step=step,
        dtype="float32",
        model={},
        layout={},
        files=checkpoints.seal_files(draft, names),
    )
    checkpoints.write_metadata(draft, metadata)
    checkpoints.publish(draft)
    checkpoints.prune(root, keep)


def found(root: Path) -> int:
    """The step of the checkpoint that a resume takes; checked to the last byte."""
    chosen = checkpoints.resolve(root)
    metadata = checkpoints.read_metadata(chosen)
    checkpoints.check_files(chosen, metadata.files, metadata.files)
    assert (chosen / "weights").read_text() == f"weights of step {metadata.step}"
    assert checkpoints.read_json(chosen / checkpoints.USER_STATE_FILE) == {"step": metadata.step}
    return metadata.step


@pytest.mark.parametrize("keep", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_save_leaves_a_whole_checkpoint_and_the_next_one_cleans_up(
    tmp_path: Path, keep: int
) -> None:
    kills, newest = 0, 1
    save(tmp_path, newest, keep)

    def save_next() -> None:
        save(tmp_path, newest + 1, keep)

    for _ in killed_everywhere(tmp_path, save_next):
        kills += 1
        assert found(tmp_path) in (newest, newest + 1)
        newest += 2
        save(tmp_path, newest, keep)
        assert found(tmp_path) == newest
        assert not checkpoints.incomplete_saves(tmp_path)
        assert len(checkpoints.complete_checkpoints(tmp_path)) <= keep + 1
    assert kills > 15


def test_a_checkpoint_of_the_same_step_is_replaced_at_once(tmp_path: Path) -> None:
    save(tmp_path, 1)
    kills = 0
    for _ in killed_everywhere(tmp_path, lambda: save(tmp_path, 1)):
        kills += 1
        assert found(tmp_path) == 1
    assert kills > 10


def test_going_back_to_an_earlier_checkpoint_can_be_killed_anywhere(tmp_path: Path) -> None:
    kills = 0
    for step in (1, 2, 3):
        save(tmp_path, step, 9)

    def go_back() -> None:
        checkpoints.set_aside_later(tmp_path / "step_0000001")

    for _ in killed_everywhere(tmp_path, go_back):
        kills += 1
        assert found(tmp_path) in (1, 3)
        for aside in tmp_path.glob(f"*{checkpoints.SET_ASIDE}"):
            aside.rename(aside.with_name(aside.name.removesuffix(checkpoints.SET_ASIDE)))
        checkpoints._mark(tmp_path / "step_0000003", checkpoints.LATEST_FILE)
    assert kills > 4


def test_a_killed_writer_of_run_files_loses_the_line_it_wrote_and_nothing_else(
    tmp_path: Path,
) -> None:
    kills, settings = 0, {"lr": 1.0}
    with RunFiles(tmp_path, settings, tensorboard=False) as files:
        files.log_step({"step": 1, "reward": 0.5})

    def go_on() -> None:
        with RunFiles(tmp_path, {"lr": float(kills + 2)}, tensorboard=False) as files:
            files.log_step({"step": 2, "reward": 0.75})
            files.log_prompts(1, [0, 1], {})
            files.log_samples(2, [{"prompt": "p"}])
            files.log_findings(2, [{"detector": "d", "summary": "s"}])
            files.write_report()

    for _ in killed_everywhere(tmp_path, go_on):
        kills += 1
        # Whoever resumes or exports reads the settings first.
        now = yaml.safe_load((tmp_path / "config.yaml").read_text())
        assert now["lr"] >= 1.0
        steps = [line["step"] for line in read_run(tmp_path).steps]
        assert steps[0] == 1 and set(steps) <= {1, 2}
        with RunFiles(tmp_path, now, tensorboard=False) as files:
            files.log_step({"step": 3, "reward": 1.0})
        assert read_run(tmp_path).steps[-1]["step"] == 3
        for name in ("metrics", "prompts", "samples", "findings"):
            file = tmp_path / f"{name}.jsonl"
            lines = file.read_text().splitlines() if file.exists() else []
            broken = [line for line in lines if not _is_json(line)]
            assert not broken, (name, broken)
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 0.5}) + "\n")
    assert kills > 10


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("there", [False, True])
def test_a_killed_export_leaves_a_whole_model_or_none(tmp_path: Path, there: bool) -> None:
    config = Qwen3Config(hidden_size=8, num_hidden_layers=1)
    target, kills = tmp_path / "model", 0

    def export(value: float) -> None:
        writer = _Writer(target, 1 << 10, replace=there)
        for name in ("a", "b", "c"):
            writer.add(name, torch.full((200,), value))
        writer.finish(config, None)

    if there:
        export(1.0)
    for _ in killed_everywhere(tmp_path, lambda: export(2.0)):
        kills += 1
        if there or target.exists():
            model = HfDirectory(target)
            values = {float(model[name].unique()) for name in ("a", "b", "c")}
            assert values == {2.0} or (there and values == {1.0}), values
            assert json.loads((target / "config.json").read_text())["model_type"] == "qwen3"
        if not there and target.exists():
            break
    assert kills > 4
    if there:
        export(3.0)
        assert float(HfDirectory(target)["a"][0]) == 3.0
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
