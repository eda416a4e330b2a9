"""Dumps and checkpoints' metadata that hypothesis spoils: what cannot be used is named, and nothing else is raised."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plugin.errors import CheckpointError
from plugin.megatron_backend.checkpoint import directory as directories
from plugin.megatron_backend.checkpoint.directory import CheckpointMetadata
from plugin.observe.log_prob_dump import LogProbDump
from plugin.tools.compare.dump_reading import open_dump

pytestmark = pytest.mark.hostile


#: What a field may not hold, or only just may.
NASTY: list[Any] = [None, True, 0, -1, 1, 2**70, 10**400, -0.5, 1e308, float("nan"), float("inf")]
NASTY += [
    "",
    "x",
    "../x",
    "/etc/passwd",
    "a\0b",
    "n" * 5000,
    "\ud800",
    [],
    {},
    [[]],
    [1],
    [-0.5] * 3,
]
NASTY += [
    [None] * 3,
    ["x"] * 3,
    [10**400] * 3,
    [[-0.5], [-1.0, -2.0]],
    {"a": 1},
    [0, 2**40],
    [-1, -1],
]
VALUES = (
    st.sampled_from(NASTY).map(copy.deepcopy) | st.integers() | st.floats() | st.text(max_size=8)
)
SPOTS, BYTES = st.integers(0, 1 << 16), st.integers(0, 255)
FUZZ = settings(
    deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)

SAMPLE = {
    "rollout_log_probs": [-0.5, -1.0, -2.0],
    "train_log_probs": [-0.5, -1.1, -2.0],
    "cur_log_probs": [-0.5, -1.1, -2.0],
    "loss_mask": [1, 0, 1],
    "advantages": [1.0, 1.0, -1.0],
    "tokens": [5, 7, 8, 9],
    "step": 1,
    "trainer_version": 1,
    "weight_version": 0,
}
ROWS = 4


def write_torch(path: Path) -> None:
    torch.save([{k: torch.tensor(v) if isinstance(v, list) else v for k, v in SAMPLE.items()}] * ROWS, path)  # fmt: skip


def write_npz(path: Path) -> None:
    np.savez(path, **{name: np.array([SAMPLE[name]] * ROWS) for name in SAMPLE})


def write_parquet(path: Path) -> None:
    columns = {
        "unconcat_tokens": [torch.tensor(SAMPLE["tokens"])] * ROWS,
        "response_lengths": [3] * ROWS,
        "loss_masks": [torch.tensor(SAMPLE["loss_mask"])] * ROWS,
        "advantages": [torch.tensor(SAMPLE["advantages"])] * ROWS,
        "rollout_log_probs": [torch.tensor(SAMPLE["rollout_log_probs"])] * ROWS,
        "log_probs": [torch.tensor(SAMPLE["train_log_probs"])] * ROWS,
        "weight_versions": [0] * ROWS,
    }
    dump = LogProbDump(path.parent / "ours")
    dump.write(1, columns, trainer_version=1)
    [written] = (path.parent / "ours").glob("*.parquet")
    path.write_bytes(written.read_bytes())


def samples_read(path: Path) -> int:
    """Reads a dump as far as it can be read, checks what came, and returns the number of samples."""
    dump = open_dump([path])
    samples = 0
    for block, _ in dump.blocks():
        samples += len(block.lengths)
        for values in (block.rollout, block.train, block.cur, block.advantages):
            assert len(values) == len(block.mask) == block.lengths.sum()
            assert np.isfinite(values).all()
    assert samples == ROWS or dump.problems or samples == 0
    return samples


@st.composite
def spoiled_rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Samples of which one has one or two values replaced, or removed."""
    rows = [copy.deepcopy(SAMPLE) for _ in range(ROWS)]
    for _ in range(draw(st.integers(1, 2))):
        row = rows[draw(st.integers(0, ROWS - 1))]
        name = draw(st.sampled_from(sorted(SAMPLE)))
        if draw(st.booleans()):
            row[name] = draw(VALUES)
        else:
            row.pop(name, None)
    return rows


def test_no_row_of_a_dump_raises_or_costs_the_others(tmp_path: Path) -> None:
    path, outcomes = tmp_path / "dump.jsonl", Counter[int]()

    @given(st.lists(spoiled_rows(), min_size=4, max_size=4))
    @settings(FUZZ, max_examples=100)
    def read(files: list[list[dict[str, Any]]]) -> None:
        for rows in files:
            path.write_text("\n".join(map(json.dumps, rows)))
            outcomes[samples_read(path)] += 1

    read()
    # At most two rows were touched.
    assert outcomes.keys() == {2, 3, 4}, outcomes


@pytest.mark.parametrize(
    ("name", "write"),
    [("d.pt", write_torch), ("d.npz", write_npz), ("d.parquet", write_parquet)],
)
def test_no_byte_of_a_dump_raises(tmp_path: Path, name: str, write: Callable[[Path], None]) -> None:
    path = tmp_path / name
    write(path)
    assert samples_read(path) == ROWS
    good = path.read_bytes()

    @given(st.lists(st.tuples(SPOTS, BYTES, SPOTS | st.just(1 << 20)), min_size=4, max_size=4))
    @settings(FUZZ, max_examples=60)
    def read(changes: list[tuple[int, int, int]]) -> None:
        for at, byte, end in changes:
            data = bytearray(good)
            data[at % len(data)] = byte
            path.write_bytes(data[:end])
            samples_read(path)

    read()


METADATA = CheckpointMetadata(
    step=3,
    trainer_version=3,
    skipped_steps=0,
    optimizer_step=3,
    dtype="float32",
    model={"hidden_size": 32},
    layout={"tp": 1},
    software={"torch": "2"},
)


@st.composite
def spoiled_metadata(draw: st.DrawFn) -> bytes:
    body: dict[str, Any] = {
        "format": directories.FORMAT,
        "format_version": directories.FORMAT_VERSION,
        **copy.deepcopy(METADATA.__dict__),
        "files": {"user_state.json": [3, 1234], "model/a": [0, 0]},
    }
    target = draw(st.sampled_from([body, body, body, body["files"], body["layout"]]))
    key = draw(st.sampled_from([*target, *target, "new", "../x", "n" * 5000]))
    if draw(st.integers(0, 3)):
        target[key] = draw(VALUES)
    else:
        target.pop(key, None)
    text = bytearray(json.dumps(body).encode())
    if draw(st.integers(0, 4)) == 0:
        at, byte, end = draw(st.tuples(SPOTS, BYTES, SPOTS))
        text[at % len(text)] = byte
        text = text[:end]
    return bytes(text)


def test_no_metadata_of_a_checkpoint_raises_anything_else(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step_0000003"
    checkpoint.mkdir()
    (checkpoint / "user_state.json").write_text("{}\n")
    outcomes: Counter[str] = Counter()

    @given(st.lists(spoiled_metadata(), min_size=4, max_size=4))
    @settings(FUZZ, max_examples=150)
    def read(texts: list[bytes]) -> None:
        for text in texts:
            (checkpoint / directories.METADATA_FILE).write_bytes(text)
            try:
                metadata = directories.read_metadata(directories.resolve(tmp_path))
                outcomes["read"] += 1
                assert isinstance(metadata.step, int) and isinstance(metadata.model, dict)
                directories.check_files(checkpoint, metadata.files, sorted(metadata.files))
            except CheckpointError as error:
                outcomes["refused"] += 1
                assert str(checkpoint) in str(error) and len(str(error)) < 3000

    read()
    assert min(outcomes["read"], outcomes["refused"]) > 20, outcomes


@pytest.mark.parametrize("text", [b"[" * 100_000, b"\xff\xfe{", b"9" * 5000, b"", b"null"])
def test_metadata_that_is_no_object_is_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / directories.METADATA_FILE).write_bytes(text)
    with pytest.raises(CheckpointError, match=r"metadata\.json .*resume from another"):
        directories.read_metadata(tmp_path)


def test_files_outside_of_a_checkpoint_are_never_read(tmp_path: Path) -> None:
    directories.write_metadata(
        tmp_path, CheckpointMetadata(**{**METADATA.__dict__, "files": {"../../etc/passwd": [1, 1]}})
    )
    with pytest.raises(CheckpointError, match=r"files .*'\.\./\.\./etc/passwd'"):
        directories.read_metadata(tmp_path)
