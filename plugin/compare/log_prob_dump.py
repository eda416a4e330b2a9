"""Writes the log-probs of every step to Parquet, one compact file per step, for `megatron-tis compare`.

A row is a sample. List columns hold one value per response token (`tokens`: per token of prompt and response):

    step, sample, trainer_version, weight_version, group_index, total_length, response_length    integers
    reward                                                                                      float32
    tokens  list<int32>;  loss_mask  list<bool>
    cur_log_probs, train_log_probs, rollout_log_probs, advantages                               list<float32>
    rollout_routed_experts, train_routed_experts                                                list<uint16>, and
    routed_layers, routed_topk to give them back their shape [total_length, layers, topk]

Columns that a job does not have are absent. Where cur equals train on every token (the first update on a
rollout) cur is not stored twice; the file's metadata says so. A file is written under another name and renamed,
so that one that exists is complete.
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
    "weight_versions": "weight_version",
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
}
ROUTES = ("rollout_routed_experts", "train_routed_experts")


class LogProbDump:
    """Writer of a dump directory. Losing the disk ends the dump with one warning, never the training."""

    def __init__(
        self,
        directory: str | Path,
        *,
        force: bool = False,
        first_step: int = 0,
        with_routes: bool = False,
    ) -> None:
        self.directory, self.force, self.with_routes = Path(directory), force, with_routes
        self.active = True
        self._written: set[Path] = set()
        taken = [path for step, path in dump_files(self.directory) if step >= first_step]
        if taken and not force:
            raise ConfigError(
                f"--dump-log-probs {self.directory} already holds {taken[0].name}; choose an empty directory or "
                "add --force to replace its steps"
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
            # A job that goes back to a checkpoint comes by its own steps again.
            if path.exists() and not self.force and path not in self._written:
                raise FileExistsError(17, "the file exists and --force was not given", str(path))
            self.directory.mkdir(parents=True, exist_ok=True)
            _write_table(_table(step, columns, trainer_version, self.with_routes), partial)
            os.replace(partial, path)
            self._written.add(path)
        except OSError as error:
            self._end(path, partial, error)
            return None
        return path

    def _end(self, path: Path, partial: Path, error: OSError) -> None:
        self.active = False
        with contextlib.suppress(OSError):  # the disk is what failed; the warning below says so
            partial.unlink(missing_ok=True)
        warnings.warn(
            f"the log-prob dump ends: {path} cannot be written ({error.strerror or error}); training goes on. "
            "What was dumped before is complete",
            stacklevel=3,
        )


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
            kind = pa.float32() if name == "reward" else pa.int64()
            arrays[name] = pa.array([_scalar(value) for value in columns[source]], kind)
    lists = {LISTS[source]: columns[source] for source in LISTS if source in columns}
    metadata = {"megatron_tis_dump": str(FORMAT_VERSION)}
    if "cur_log_probs" in lists and _same(lists["cur_log_probs"], lists.get("train_log_probs")):
        del lists["cur_log_probs"]
        metadata["cur_log_probs"] = "train_log_probs"
    for name, values in lists.items():
        arrays[name] = _list_array(values, _list_type(name))
    if routes:
        for name in ROUTES:
            if name in columns:
                arrays |= _route_arrays(name, columns[name])
    return pa.table(arrays).replace_schema_metadata(metadata)


def _list_type(name: str) -> type:
    return {"tokens": np.int32, "loss_mask": np.bool_}.get(name, np.float32)


def _list_array(values: Sequence[Any], kind: type) -> pa.Array:
    import pyarrow as pa

    rows = [np.asarray(value).reshape(-1) for value in values]
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    flat = np.concatenate(rows) if rows else np.zeros(0)
    flat = flat != 0 if kind is np.bool_ else flat.astype(kind)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))


def _route_arrays(name: str, values: Sequence[Any]) -> dict[str, pa.Array]:
    import pyarrow as pa

    routes = [np.asarray(value) for value in values]
    return {
        name: _list_array(routes, np.uint16),
        "routed_layers": pa.array([route.shape[1] for route in routes], pa.int32()),
        "routed_topk": pa.array([route.shape[2] for route in routes], pa.int32()),
    }


def _write_table(table: pa.Table, path: Path) -> None:
    import pyarrow.parquet as pq

    floats = [name for name in table.column_names if name.endswith("log_probs")]
    tokens = max(int(sum(table["response_length"].to_pylist())), 1)
    rows = max(1, table.num_rows * TOKENS_PER_ROW_GROUP // tokens)
    pq.write_table(
        table,
        path,
        row_group_size=rows,
        compression="zstd",
        # Bytes of equal weight side by side: the exponents of log-probs then compress.
        column_encoding={f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in floats},
        use_dictionary=[name for name in table.column_names if name not in floats],
    )


def _same(first: Sequence[Any], second: Sequence[Any] | None) -> bool:
    return second is not None and all(
        np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)
        for a, b in zip(first, second, strict=True)
    )


def _scalar(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
