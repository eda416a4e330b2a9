"""Checkpoint directories: what is published is whole, what is not is never resumed from."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from plugin.errors import CheckpointError
from plugin.megatron_backend.checkpoint.directory import (
    FORMAT,
    CheckpointMetadata,
    begin,
    best_checkpoint,
    check_files,
    complete_checkpoints,
    mark_best,
    prune,
    publish,
    read_json,
    read_metadata,
    resolve,
    seal_files,
    set_aside_later,
    step_of,
    write_json,
    write_metadata,
)


def metadata(step: int, files: dict[str, list[int]] | None = None) -> CheckpointMetadata:
    return CheckpointMetadata(
        step=step,
        trainer_version=step,
        skipped_steps=0,
        optimizer_step=step,
        dtype="float32",
        model={"hidden_size": 8},
        layout={"tp": 2},
        files=files or {},
    )


def saved(root: Path, step: int) -> Path:
    """A published checkpoint with one file."""
    directory = begin(root, step)
    (directory / "data").write_text(f"step {step}")
    write_metadata(directory, metadata(step, seal_files(directory, ["data"])))
    return publish(directory)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_published_checkpoint_is_the_latest_and_nothing_else_is_left(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    assert saved(root, 12) == root / "step_0000012"
    assert names(root) == ["latest", "step_0000012"]
    assert (root / "latest").read_text() == "step_0000012\n"
    assert resolve(root) == resolve(root / "step_0000012") == root / "step_0000012"


def test_steps_are_ordered_by_number_also_beyond_seven_digits(tmp_path: Path) -> None:
    for step in (10_000_000, 9_999_999):
        saved(tmp_path, step)
    assert [path.name for path in complete_checkpoints(tmp_path)] == [
        "step_9999999",
        "step_10000000",
    ]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    directory = begin(tmp_path, 1)
    (directory / "data").write_text("again")
    write_metadata(directory, metadata(1))
    assert (publish(directory) / "data").read_text() == "again"
    assert names(tmp_path) == ["latest", "step_0000001"]


def test_an_unfinished_save_is_named_in_a_warning_and_not_resumed_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1)
    left = begin(tmp_path, 2)
    assert resolve(tmp_path) == tmp_path / "step_0000001"
    assert f"{left} is incomplete: its save did not finish" in caplog.text
    with pytest.raises(CheckpointError, match="left behind by a save that did not finish"):
        resolve(left)


def test_only_unfinished_saves_are_an_error_that_says_so(tmp_path: Path) -> None:
    begin(tmp_path, 2)
    with pytest.raises(
        CheckpointError, match=r"no complete checkpoint \(only step_0000002.incomplete"
    ):
        resolve(tmp_path)


def test_the_marker_decides_and_a_newer_checkpoint_is_mentioned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1)
    saved(tmp_path, 2)
    (tmp_path / "latest").write_text("step_0000001\n")
    assert resolve(tmp_path).name == "step_0000001"
    assert "step_0000002 is newer and complete" in caplog.text


@pytest.mark.parametrize("marker", [None, "", "step_0000009\n", "../../etc\n"])
def test_a_marker_that_leads_nowhere_gives_the_newest_checkpoint_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, marker: str | None
) -> None:
    saved(tmp_path, 1)
    saved(tmp_path, 2)
    (tmp_path / "latest").unlink()
    if marker is not None:
        (tmp_path / "latest").write_text(marker)
    assert resolve(tmp_path).name == "step_0000002"
    assert "which is no complete checkpoint" in caplog.text


def test_what_a_killed_removal_leaves_is_no_save_that_did_not_finish(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1)
    for name in ("step_0000000.removed.incomplete", "step_0000001.replaced.incomplete"):
        (tmp_path / name).mkdir()
    assert resolve(tmp_path).name == "step_0000001" and caplog.text == ""
    prune(tmp_path, None)
    assert names(tmp_path) == ["latest", "step_0000001"]


def test_a_marker_of_terabytes_is_not_read(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    with (tmp_path / "latest").open("wb") as file:
        file.truncate(1 << 40)
    assert resolve(tmp_path).name == "step_0000001"


@pytest.mark.parametrize("kind", ["missing", "file", "empty"])
def test_a_path_without_checkpoints_is_an_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "somewhere"
    if kind == "file":
        path.touch()
    elif kind == "empty":
        path.mkdir()
    with pytest.raises(CheckpointError, match=r"not a directory|no complete checkpoint"):
        resolve(path)


def test_the_last_k_stay_and_remains_of_killed_saves_go(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        saved(tmp_path, step)
    begin(tmp_path, 5)
    prune(tmp_path, None)
    assert names(tmp_path) == ["latest", *(f"step_000000{step}" for step in (1, 2, 3, 4))]
    prune(tmp_path, 2)
    assert names(tmp_path) == ["latest", "step_0000003", "step_0000004"]


def test_pruning_never_removes_the_latest(tmp_path: Path) -> None:
    # Step 1 was saved again after a roll-back; by number it is the oldest.
    for step in (1, 2, 3):
        saved(tmp_path, step)
    saved(tmp_path, 1)
    prune(tmp_path, 1)
    assert names(tmp_path) == ["latest", "step_0000001", "step_0000003"]


@pytest.mark.parametrize(("step", "keep_last"), [(-1, None), (1, 0)])
def test_impossible_requests_are_refused_before_anything_is_written(
    tmp_path: Path, step: int, keep_last: int | None
) -> None:
    with pytest.raises(CheckpointError, match="must be at least"):
        begin(tmp_path / "root", step, keep_last)
    assert names(tmp_path) == []


def test_metadata_comes_back_as_written(tmp_path: Path) -> None:
    directory = begin(tmp_path, 3)
    written = metadata(3, {"a/b": [1, 2]})
    write_metadata(directory, written)
    assert read_metadata(directory) == written


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "holds a list instead of an object"),
        ('{"sharded_backend": "torch_dist"}', "has format None instead of"),
        (
            json.dumps({"format": FORMAT, "format_version": 2}),
            "format version 2; this release reads",
        ),
        (json.dumps({"format": FORMAT, "format_version": 1, "step": 1}), "differs in"),
    ],
)
def test_metadata_of_another_kind_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "metadata.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        read_metadata(tmp_path)


def test_every_file_is_recorded_with_its_size_and_checksum(tmp_path: Path) -> None:
    directory = saved(tmp_path, 1)
    (directory / "model").mkdir()
    (directory / "model" / ".hidden").write_bytes(b"xyz")
    records = seal_files(directory, ["data", "model/.hidden"])
    assert records == {"data": [6, zlib.crc32(b"step 1")], "model/.hidden": [3, zlib.crc32(b"xyz")]}
    check_files(directory, records, records)


def test_missing_shortened_and_altered_files_are_told_apart(tmp_path: Path) -> None:
    directory = saved(tmp_path, 1)
    records = read_metadata(directory).files
    (directory / "data").write_text("step 2")
    with pytest.raises(CheckpointError, match="CRC-32 differs"):
        check_files(directory, records, records)
    os.truncate(directory / "data", 4)
    with pytest.raises(CheckpointError, match="has 4 bytes instead of 6"):
        check_files(directory, records, records)
    (directory / "data").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        check_files(directory, records, records)


@pytest.mark.parametrize("value", [{"a": (1, 2)}, {1: "a"}, {"a": float("inf")}, {"a": {1, 2}}])
def test_values_that_json_would_change_are_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(
        CheckpointError, match=r"user_state.json (cannot hold|would not be read back as written)"
    ):
        write_json(tmp_path / "user_state.json", value)


def test_values_that_json_keeps_come_back(tmp_path: Path) -> None:
    value = {"cursor": 7, "queue": [[1, "é"], None, True], "nested": {"x": 0.1}}
    write_json(tmp_path / "user_state.json", value)
    assert read_json(tmp_path / "user_state.json") == value


def test_the_best_checkpoint_stays_when_older_ones_are_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        saved(tmp_path, step)
    assert best_checkpoint(tmp_path) is None
    mark_best(tmp_path / "step_0000002")
    prune(tmp_path, keep_last=1)
    assert names(tmp_path) == ["best", "latest", "step_0000002", "step_0000004"]
    assert best_checkpoint(tmp_path) == tmp_path / "step_0000002"
    mark_best(tmp_path / "step_0000004")
    prune(tmp_path, keep_last=1)
    assert names(tmp_path) == ["best", "latest", "step_0000004"]


def _is_a_directory(marker: Path) -> None:
    marker.unlink()
    marker.mkdir()
    (marker / "notes").write_text("mine")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda marker: marker.write_text(""),
    "garbage": lambda marker: marker.write_bytes(b"\0\xff" * 50),
    "another name": lambda marker: marker.write_text("step_0000007\n"),
    "a long name": lambda marker: marker.write_text("step_" + "9" * 5000),
    "a directory": _is_a_directory,
    "a dead link": lambda marker: (marker.unlink(), marker.symlink_to("nowhere")),
    "a fifo": lambda marker: (marker.unlink(), os.mkfifo(marker)),
}


@pytest.mark.hostile
@pytest.mark.parametrize("kind", DAMAGE)
def test_no_checkpoint_is_removed_while_the_marker_of_the_best_is_damaged(
    tmp_path: Path, kind: str
) -> None:
    for step in (1, 2, 3, 4):
        saved(tmp_path, step)
    mark_best(tmp_path / "step_0000002")
    DAMAGE[kind](tmp_path / "best")
    prune(tmp_path, keep_last=1)
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == [1, 2, 3, 4]
    assert best_checkpoint(tmp_path) is None
    mark_best(tmp_path / "step_0000002")
    prune(tmp_path, keep_last=1)
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == [2, 4]
    if kind == "a directory":
        [aside] = tmp_path.glob("best.*.set_aside")
        assert (aside / "notes").read_text() == "mine"


def test_a_best_checkpoint_that_a_run_went_back_beyond_is_none(tmp_path: Path) -> None:
    first = saved(tmp_path, 1)
    mark_best(saved(tmp_path, 2))
    set_aside_later(first)
    assert best_checkpoint(tmp_path) is None
