"""Dumps: what is written comes back, nothing is overwritten, a lost disk ends the dump alone."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from plugin.errors import ConfigError
from plugin.observe.log_prob_dump import LogProbDump, dump_files
from plugin.tools.compare.dump_reading import open_dump
from tests.unit.observe.dump_samples import batch_columns


def test_a_dump_reads_back_as_it_was_written(tmp_path: Path) -> None:
    columns = batch_columns()
    columns["cur_log_probs"][0] = columns["cur_log_probs"][0] - 0.25
    LogProbDump(tmp_path / "dump").write(4, columns, trainer_version=5)
    dump = open_dump([tmp_path / "dump"])
    [(block, _)] = list(dump.blocks())
    assert dump.problems == []
    assert block.lengths.tolist() == columns["response_lengths"]
    for mine, theirs in (
        (block.rollout, "rollout_log_probs"),
        (block.train, "log_probs"),
        (block.cur, "cur_log_probs"),
        (block.advantages, "advantages"),
    ):
        np.testing.assert_array_equal(mine, np.concatenate([v.numpy() for v in columns[theirs]]))
    assert set(block.step.tolist()) == {4}
    assert set(block.trainer_version.tolist()) == {5}
    assert set(block.weight_versions.tolist()) == {3}


def test_versions_per_token_come_back_and_old_dumps_with_one_number_are_spread(
    tmp_path: Path,
) -> None:
    columns = batch_columns(samples=3)
    columns["weight_versions"] = [
        torch.tensor([5]),
        torch.tensor([5, 6]),
        torch.tensor([4, 5, 6]),
    ]
    path = LogProbDump(tmp_path).write(0, columns)
    assert path is not None
    [(block, _)] = list(open_dump([path]).blocks())
    assert block.weight_versions.tolist() == [5, 5, 6, 4, 5, 6]
    assert [row.tolist() for row in block.batch_columns()["weight_versions"]] == [[5], [5, 6], [4, 5, 6]]  # fmt: skip
    table = pq.read_table(path).drop_columns(["weight_versions"])
    old = tmp_path / "old.parquet"
    pq.write_table(table.append_column("weight_version", pa.array([1, 2, 3])), old)
    [(block, _)] = list(open_dump([old]).blocks())
    assert block.weight_versions.tolist() == [1, 2, 2, 3, 3, 3]


def test_current_log_probs_equal_to_the_trainers_are_stored_once(tmp_path: Path) -> None:
    path = LogProbDump(tmp_path).write(0, batch_columns())
    assert path is not None
    assert "cur_log_probs" not in pq.read_schema(path).names
    [(block, _)] = list(open_dump([path]).blocks())
    np.testing.assert_array_equal(block.cur, block.train)


def test_masked_garbage_survives_the_way_and_is_neutralised_on_reading(tmp_path: Path) -> None:
    columns = batch_columns()
    columns["loss_masks"][3][1] = 0
    columns["rollout_log_probs"][3][1] = float("nan")
    path = LogProbDump(tmp_path).write(0, columns)
    dump = open_dump([path])
    [(block, _)] = list(dump.blocks())
    assert dump.problems == []
    assert len(block.lengths) == 6
    assert np.isfinite(block.rollout).all()


def test_an_existing_step_is_replaced_only_with_force(tmp_path: Path) -> None:
    LogProbDump(tmp_path).write(7, batch_columns(samples=2))
    with pytest.raises(ConfigError, match=r"step-000007\.parquet.*force=True"):
        LogProbDump(tmp_path)
    dump = LogProbDump(tmp_path, force=True)
    dump.write(8, batch_columns(samples=2))
    dump.write(7, batch_columns(samples=5))
    assert [step for step, _ in dump_files(tmp_path)] == [7, 8]
    assert pq.read_metadata(tmp_path / "step-000007.parquet").num_rows == 5


def test_a_full_disk_ends_the_dump_with_one_warning(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where the directory should be")
    dump = LogProbDump(blocked / "dump")
    with pytest.warns(UserWarning, match="the log-prob dump ends") as caught:
        assert dump.write(0, batch_columns()) is None
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dump.write(1, batch_columns()) is None


def test_no_partial_file_is_left_behind_when_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(table: object, path: Path, **_: object) -> None:
        Path(path).write_bytes(b"PAR1 and no more")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", no_space)
    with pytest.warns(UserWarning, match="No space left on device"):
        LogProbDump(tmp_path).write(0, batch_columns())
    assert list(tmp_path.iterdir()) == []


def test_routes_come_back_in_their_shape(tmp_path: Path) -> None:
    columns = batch_columns(samples=2)
    routes = [np.arange(total * 6).reshape(total, 3, 2) % 8 for total in columns["total_lengths"]]
    columns["rollout_routed_experts"] = routes
    columns["rollout_routed_weights"] = [(route + 0.5).astype(np.float32) for route in routes]
    LogProbDump(tmp_path, with_routes=True).write(0, columns)
    [(block, _)] = list(open_dump([tmp_path]).blocks())
    np.testing.assert_array_equal(block.routes["rollout_routed_experts"][1], routes[1])
    np.testing.assert_array_equal(block.routes["rollout_routed_weights"][1], routes[1] + 0.5)
    np.testing.assert_array_equal(block.sequences[1], columns["unconcat_tokens"][1])


def test_kept_ids_travel_with_the_log_probs_that_are_over_them(tmp_path: Path) -> None:
    columns = batch_columns(samples=2)  # responses of 1 and 2 tokens
    columns["rollout_kept_ids"] = [torch.tensor([0, 5]), torch.tensor([7, 8, 9])]
    columns["rollout_kept_counts"] = [torch.tensor([2]), torch.tensor([0, 3])]
    path = LogProbDump(tmp_path).write(0, columns)
    assert path is not None
    table = pq.read_table(path)
    assert table["kept_ids"].to_pylist() == [[0, 5], [7, 8, 9]]
    assert table["kept_counts"].to_pylist() == [[2], [0, 3]]
    dump = open_dump([path])
    [(block, _)] = list(dump.blocks())
    assert block.kept["kept_ids"][1].tolist() == [7, 8, 9]
    assert dump.problems == [] and block.lengths.tolist() == [1, 2]


def test_lists_have_64_bit_offsets_and_dumps_with_32_bit_ones_are_read_as_well(
    tmp_path: Path,
) -> None:
    columns = batch_columns(samples=3)
    path = LogProbDump(tmp_path).write(0, columns)
    assert path is not None
    table = pq.read_table(path)
    lists = {field.name: field.type for field in table.schema if pa.types.is_nested(field.type)}
    assert "rollout_log_probs" in lists
    assert all(pa.types.is_large_list(kind) for kind in lists.values())
    old = tmp_path / "old.parquet"
    for name, kind in lists.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, table[name].cast(pa.list_(kind.value_type)))
    pq.write_table(table, old)
    [(new, _)], [(block, _)] = (list(open_dump([file]).blocks()) for file in (path, old))
    np.testing.assert_array_equal(block.rollout, new.rollout)
