"""Reading dumps of any origin: aliases, bounded blocks, and bad input named with file and row."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from plugin.errors import ConfigError
from plugin.observe.log_prob_dump import LogProbDump
from plugin.tools.compare import dump_columns
from plugin.tools.compare.dump_reading import open_dump
from tests.unit.observe.dump_samples import batch_columns

ROLLOUT = [[-1.0, -2.0, -0.5], [-0.25, -4.0]]
TRAIN = [[-1.5, -2.0, -0.5], [-0.5, -3.0]]
FLAT_ROLLOUT, FLAT_TRAIN = [-1.0, -2.0, -0.5, -0.25, -4.0], [-1.5, -2.0, -0.5, -0.5, -3.0]


def read(path: Path) -> dump_columns.DumpBlock:
    dump = open_dump([path])
    [(block, _)] = list(dump.blocks())
    assert dump.problems == []
    return block


def test_jsonl_with_foreign_names_is_read(tmp_path: Path) -> None:
    path = tmp_path / "dump.jsonl"
    rows = [
        {"inference_logprobs": r, "old_log_probs": t, "advantage": a, "policy_version": 2}
        for r, t, a in zip(ROLLOUT, TRAIN, (1.0, -0.5), strict=True)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    block = read(path)
    assert block.rollout.tolist() == FLAT_ROLLOUT
    assert block.cur.tolist() == block.train.tolist() == FLAT_TRAIN
    assert block.advantages.tolist() == [1, 1, 1, -0.5, -0.5]
    assert block.weight_versions.tolist() == [2] * 5
    assert block.mask.all()


def test_pt_files_hold_samples_or_columns_of_lists_or_padded_rows(tmp_path: Path) -> None:
    tensors = [torch.tensor(row) for row in ROLLOUT], [torch.tensor(row) for row in TRAIN]
    padded = [torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) for rows in tensors]
    spellings = {
        "samples": [
            {"rollout_log_probs": r, "log_probs": t} for r, t in zip(*tensors, strict=True)
        ],
        "lists": {"rollout_log_probs": tensors[0], "train_log_probs": tensors[1]},
        "padded": {
            "rollout_log_probs": padded[0],
            "log_probs": padded[1],
            "response_lengths": torch.tensor([3, 2]),
        },
    }
    for name, content in spellings.items():
        torch.save(content, tmp_path / f"{name}.pt")
        block = read(tmp_path / f"{name}.pt")
        assert block.rollout.tolist() == FLAT_ROLLOUT, name
        assert block.train.tolist() == FLAT_TRAIN, name


def test_npz_files_hold_flat_columns_with_lengths(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "dump.npz",
        rollout_log_probs=np.array(FLAT_ROLLOUT),
        log_probs=np.array(FLAT_TRAIN),
        response_lengths=np.array([3, 2]),
    )
    block = read(tmp_path / "dump.npz")
    assert block.lengths.tolist() == [3, 2]
    assert block.train.tolist() == FLAT_TRAIN


def test_a_pickle_inside_a_pt_or_npz_file_is_refused_and_named(tmp_path: Path) -> None:
    # A class that nobody puts on torch's list of safe ones; Megatron puts paths there.
    evil = Fraction(1, 2)
    torch.save({"rollout_log_probs": evil}, tmp_path / "evil.pt")
    np.savez(tmp_path / "evil.npz", rollout_log_probs=np.array([evil], dtype=object))
    dump = open_dump([tmp_path / "evil.pt", tmp_path / "evil.npz"])
    assert list(dump.blocks()) == []
    assert [("evil.pt" in p, "evil.npz" in p) for p in dump.problems] == [
        (True, False),
        (False, True),
    ]
    assert "weights_only" in dump.problems[0]


def test_broken_rows_are_named_and_the_others_used(tmp_path: Path) -> None:
    path = tmp_path / "dump.jsonl"
    good = json.dumps({"rollout_log_probs": [-1.0, -2.0], "train_log_probs": [-1.0, -2.5]})
    short = json.dumps({"rollout_log_probs": [-1.0, -2.0], "train_log_probs": [-1.0]})
    infinite = json.dumps({"rollout_log_probs": [-1.0, 3.0], "train_log_probs": [-1.0, -1.0]})
    nothing = json.dumps({"tokens": [1, 2]})
    path.write_text("\n".join([good, short, "not json", infinite, nothing, good, good[:20]]))
    dump = open_dump([path])
    blocks = [block for block, _ in dump.blocks()]
    assert sum(len(block.lengths) for block in blocks) == 2
    problems = "\n".join(dump.problems)
    for row in (1, 2, 3, 4, 6):
        assert f"dump.jsonl: row {row}" in problems
    assert len(dump.problems) == 5


def test_truncated_and_corrupt_parquet_files_are_named_and_the_rest_read(tmp_path: Path) -> None:
    dump = LogProbDump(tmp_path)
    for step in range(3):
        dump.write(step, batch_columns(samples=4))
    whole = (tmp_path / "step-000001.parquet").read_bytes()
    (tmp_path / "step-000001.parquet").write_bytes(whole[: len(whole) // 2])
    reading = open_dump([tmp_path])
    steps = [int(block.step[0]) for block, _ in reading.blocks()]
    assert steps == [0, 2]
    assert len(reading.problems) == 1
    assert "step-000001.parquet" in reading.problems[0]


def test_a_corrupt_row_group_is_named_by_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plugin.observe.log_prob_dump.TOKENS_PER_ROW_GROUP", 8)
    path = LogProbDump(tmp_path).write(0, batch_columns(samples=12))
    assert path is not None
    content = bytearray(path.read_bytes())
    content[4:60] = bytes(56)  # the first row group follows the four bytes of the magic number
    path.write_bytes(content)
    dump = open_dump([path])
    rows = sum(len(block.lengths) for block, _ in dump.blocks())
    assert 0 < rows < 12
    assert "rows 0 to" in dump.problems[0]


def test_blocks_have_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump_columns, "BLOCK_TOKENS", 10)
    path = LogProbDump(tmp_path).write(0, batch_columns(samples=20))
    blocks = [block for block, _ in open_dump([path]).blocks()]
    # Lengths go up to 7 and a block ends with the row that reaches 10 tokens: at most 9 + 7.
    assert max(block.tokens for block in blocks) <= 16
    assert sum(len(block.lengths) for block in blocks) == 20


def test_paths_that_are_no_dump_say_what_is_expected(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a")
    with pytest.raises(ConfigError, match=r"\.csv.*\.parquet"):
        open_dump([tmp_path / "x.csv"])
    with pytest.raises(ConfigError, match="does not exist"):
        open_dump([tmp_path / "missing.pt"])
    with pytest.raises(ConfigError, match="holds no dump"):
        open_dump([tmp_path])


def test_routes_of_other_frameworks_samples_are_read_and_a_wrong_shape_is_named(
    tmp_path: Path,
) -> None:
    routes = torch.arange(12).reshape(3, 2, 2) % 4
    sample = {
        "tokens": torch.tensor([5, 6, 7]),
        "rollout_log_probs": torch.tensor([-0.5, -1.0]),
        "log_probs": torch.tensor([-0.5, -1.0]),
        "rollout_routed_experts": routes,
        "rollout_routed_weights": routes + 0.5,
    }
    torch.save([sample, {**sample, "rollout_routed_experts": routes[0]}], tmp_path / "a.pt")
    dump = open_dump([tmp_path / "a.pt"])
    [(block, _)] = list(dump.blocks())
    np.testing.assert_array_equal(block.routes["rollout_routed_experts"][0], routes)
    np.testing.assert_array_equal(block.routes["rollout_routed_weights"][0], routes + 0.5)
    assert "row 1: rollout_routed_experts has shape [2, 2]" in dump.problems[0]
