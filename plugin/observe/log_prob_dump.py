"""Writes the log-probs of every step to Parquet, one file per step, for `megatron-tis compare`.

A row is a sample. Lists hold one value per response token (`tokens`: also of the prompt):

    integers       step, sample, trainer_version, group_index, total_length, response_length
    float32        reward
    list<int32>    tokens, weight_versions
    list<bool>     loss_mask
    list<float32>  cur_log_probs, train_log_probs, rollout_log_probs, advantages
    list<int32>    kept_counts, kept_ids: per response token, how many ids truncated sampling kept
                   (0 = all), and these ids end to end; where present, every log-prob is of them
    list<int32>    rollout_routed_experts, train_routed_experts, -1 = no route; routed_layers and
                   routed_topk give them back their shape [total_length, layers, topk]
    list<float32>  rollout_routed_weights, of the same shape: what each expert was weighted with

Columns that a job does not have are absent. Where cur equals train on every token (the first update
on a rollout) cur is not stored twice; the file's metadata says so. A file is written under another
name and renamed, so that one that exists is complete.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plugin.errors import ConfigError
from plugin.vocabulary_ids import KEPT_COUNTS, KEPT_IDS

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT_VERSION = 1
#: Rows are grouped so that a reader needs about this many tokens in memory at a time.
TOKENS_PER_ROW_GROUP = 1 << 18
_FILE_NAME = re.compile(r"step-(\d+)\.parquet$")
#: Names in a batch's columns -> names in the file.
SCALARS = {
    "total_lengths": "total_length",
    "response_lengths": "response_length",
    "group_index": "group_index",
    "rewards": "reward",
}
LISTS = {
    "unconcat_tokens": "tokens",
    "loss_masks": "loss_mask",
    "cur_log_probs": "cur_log_probs",
    "log_probs": "train_log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "advantages": "advantages",
    "weight_versions": "weight_versions",
    KEPT_COUNTS: "kept_counts",
    KEPT_IDS: "kept_ids",
}
ROUTES = ("rollout_routed_experts", "rollout_routed_weights", "train_routed_experts")
_ELEMENTS: dict[str, type] = {
    "loss_mask": np.bool_,
    **dict.fromkeys(("tokens", "weight_versions", "kept_counts", "kept_ids"), np.int32),
}


class LogProbDump:
    """Writes a dump directory. A full disk ends the dump with a warning, never the training."""

    def __init__(
        self,
        directory: str | Path,
        *,
        force: bool = False,
        with_routes: bool = False,
    ) -> None:
        self.directory, self.force, self.with_routes = Path(directory), force, with_routes
        self.active = True
        self._written: set[Path] = set()
        taken = dump_files(self.directory)
        if taken and not force:
            raise ConfigError(
                f"{self.directory} already holds {taken[0][1].name}; choose an empty directory, or "
                "pass force=True to replace its steps"
            )

    def write(
        self, step: int, columns: Mapping[str, Sequence[Any]], *, trainer_version: int | None = None
    ) -> Path | None:
        """Write the samples of one step (columns named as in `RolloutBatch`, plus `cur_log_probs`).

        None once the dump has ended.
        """
        if not self.active:
            return None
        path = self.directory / f"step-{step:06d}.parquet"
        partial = path.with_suffix(".partial")
        try:
            # A job that goes back to a checkpoint repeats its own steps.
            if path.exists() and not self.force and path not in self._written:
                raise FileExistsError(17, "the file exists", str(path))
            self.directory.mkdir(parents=True, exist_ok=True)
            _write_table(_table(step, columns, trainer_version, self.with_routes), partial)
            os.replace(partial, path)
            self._written.add(path)
        except OSError as error:
            self.active = False
            # The disk failed; the warning below reports it.
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            warnings.warn(
                f"the log-prob dump ends: {path} cannot be written ({error.strerror or error}); "
                "training continues. Earlier steps of the dump are complete",
                stacklevel=2,
            )
            return None
        return path

    def remove_after(self, step: int) -> None:
        """Delete the files of later steps: the job that wrote them has gone back to `step`."""
        for later, path in dump_files(self.directory):
            if later > step:
                with contextlib.suppress(OSError):
                    path.unlink()


def dump_files(directory: Path) -> list[tuple[int, Path]]:
    """(step, file) of a dump directory in the order of steps; empty if there is none."""
    if not directory.is_dir():
        return []
    found = [(_FILE_NAME.search(path.name), path) for path in directory.iterdir()]
    return sorted((int(match.group(1)), path) for match, path in found if match)


def _table(
    step: int, columns: Mapping[str, Sequence[Any]], trainer_version: int | None, routes: bool
) -> pa.Table:
    import pyarrow as pa

    count = len(columns["response_lengths"])
    arrays: dict[str, pa.Array] = {
        "step": pa.array(np.full(count, step, np.int32)),
        "sample": pa.array(np.arange(count, dtype=np.int32)),
    }
    if trainer_version is not None:
        arrays["trainer_version"] = pa.array(np.full(count, trainer_version, np.int64))
    for source, name in SCALARS.items():
        if source in columns:
            number, kind = (float, pa.float32()) if name == "reward" else (int, pa.int64())
            arrays[name] = pa.array([number(value) for value in columns[source]], kind)
    lists = {LISTS[source]: columns[source] for source in LISTS if source in columns}
    if "weight_versions" in lists:
        pairs = zip(lists["weight_versions"], columns["response_lengths"], strict=True)
        lists["weight_versions"] = [np.broadcast_to(value, int(n)) for value, n in pairs]
    metadata = {"megatron_tis_dump": str(FORMAT_VERSION)}
    train = lists.get("train_log_probs")
    if train is not None and "cur_log_probs" in lists:
        pairs = zip(lists["cur_log_probs"], train, strict=True)
        if all(np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True) for a, b in pairs):
            del lists["cur_log_probs"]
            metadata["cur_log_probs"] = "train_log_probs"
    for name, values in lists.items():
        arrays[name] = _list_array(values, _ELEMENTS.get(name, np.float32))
    for name in ROUTES if routes else ():
        if name in columns:
            shapes = [np.shape(value) for value in columns[name]]
            kind = np.float32 if name == "rollout_routed_weights" else np.int32
            arrays[name] = _list_array(columns[name], kind)
            arrays["routed_layers"] = pa.array([shape[1] for shape in shapes], pa.int32())
            arrays["routed_topk"] = pa.array([shape[2] for shape in shapes], pa.int32())
    return pa.table(arrays).replace_schema_metadata(metadata)


def _list_array(values: Sequence[Any], kind: type) -> pa.Array:
    import pyarrow as pa

    rows = [np.asarray(value).reshape(-1) for value in values]
    flat = np.concatenate(rows or [np.zeros(0)])
    flat = flat != 0 if kind is np.bool_ else flat.astype(kind)
    # Routes of a step are more than 2^31 numbers: 32-bit offsets would wrap.
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(flat))


def _write_table(table: pa.Table, path: Path) -> None:
    import pyarrow.parquet as pq

    floats = [name for name in table.column_names if name.endswith(("log_probs", "weights"))]
    tokens = max(int(sum(table["response_length"].to_pylist())), 1)
    pq.write_table(
        table,
        path,
        row_group_size=max(1, table.num_rows * TOKENS_PER_ROW_GROUP // tokens),
        compression="zstd",
        # Bytes of equal weight side by side: the exponents of log-probs then compress.
        column_encoding={f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in floats},
        use_dictionary=[name for name in table.column_names if name not in floats],
    )
