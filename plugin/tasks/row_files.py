"""Rows of a dataset on disk: JSONL, Parquet, and what Hugging Face's `save_to_disk` writes.

A path is a file, a directory or a pattern such as `data/train-*.parquet`. Rows stay in the order of
the files' names. Arrow files are memory-mapped, not read; pyarrow is imported only for them.
"""

from __future__ import annotations

import glob
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from plugin.errors import ConfigError
from plugin.json_lines import read_json_lines, read_settings, require_file

_ROWS_AT_ONCE = 1000
_TABLES = (".parquet", ".arrow")


@dataclass(frozen=True)
class BadRow:
    """A row that is not a mapping of columns to values."""

    problem: str


Row = dict[str, Any] | BadRow


@dataclass(frozen=True, order=True)
class Place:
    """The position of a row: lines count from 1, rows of a table from 0."""

    file: Path
    unit: str
    number: int

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


class Rows:
    """The rows of one or several files, by number from 0 on."""

    def __init__(self, parts: Sequence[_JsonRows | _TableRows]) -> None:
        self._parts = parts
        self._starts = list(accumulate(map(len, parts), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, number: int) -> Row:
        part, place = self._find(number)
        return part[place]

    def __iter__(self) -> Iterator[Row]:
        return chain.from_iterable(self._parts)

    def place(self, number: int) -> Place:
        """Where row `number` is."""
        part, place = self._find(number)
        return part.place(place)

    def _find(self, number: int) -> tuple[_JsonRows | _TableRows, int]:
        part = bisect_right(self._starts, number) - 1
        return self._parts[part], number - self._starts[part]


def open_rows(path: str | Path, option: str) -> Rows:
    """The rows at `path`, or a `ConfigError` that names `option` and what is there instead."""
    return Rows([_open_file(file, option) for file in _files(Path(path), option)])


class _JsonRows:
    """The lines of a JSONL file that are not blank."""

    def __init__(self, file: Path) -> None:
        self._file = file
        lines = list(read_json_lines(file))
        self._numbers = [line.number for line in lines]
        self._values: list[Row] = [
            BadRow(line.problem) if line.value is None else line.value for line in lines
        ]

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, number: int) -> Row:
        return self._values[number]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._values)

    def place(self, number: int) -> Place:
        return Place(self._file, "line", self._numbers[number])


class _TableRows:
    """The rows of an Arrow table, converted to Python objects on access."""

    def __init__(self, file: Path, table: Any) -> None:
        self._file, self._table = file, table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, number: int) -> Row:
        row: dict[str, Any] = self._table.slice(number, 1).to_pylist()[0]
        return row

    def __iter__(self) -> Iterator[Row]:
        for batch in self._table.to_batches(max_chunksize=_ROWS_AT_ONCE):
            yield from batch.to_pylist()

    def place(self, number: int) -> Place:
        return Place(self._file, "row", number)


def _files(path: Path, option: str) -> list[Path]:
    if path.is_dir():
        return _files_in(path, option)
    if path.exists() or not glob.has_magic(str(path)):
        return [path]
    files = sorted(Path(name) for name in glob.glob(str(path)))
    if not files:
        raise ConfigError(f"{option} {path}: no file has such a name; correct the pattern")
    return files


def _files_in(directory: Path, option: str) -> list[Path]:
    """The data files of a directory; a dataset with several splits is refused."""
    state, splits = directory / "state.json", directory / "dataset_dict.json"
    if splits.is_file():
        named = _json(splits, option).get("splits")
        names = [str(name) for name in named] if isinstance(named, list) else []
        raise ConfigError(
            f"{option} {directory} holds the splits {', '.join(names)}; name one of them, such as "
            f"{directory / (names or ['train'])[0]}"
        )
    if state.is_file():
        listed = _json(state, option).get("_data_files")
        entries = listed if isinstance(listed, list) else []
        names = [str(entry.get("filename")) for entry in entries if isinstance(entry, dict)]
        if names:
            return [directory / name for name in names]
    for suffix in (*_TABLES, ".jsonl"):
        found = sorted(directory.glob(f"*{suffix}"))
        kinds = sorted({file.name.split("-")[0] for file in found if "-of-" in file.name})
        if len(kinds) > 1:
            raise ConfigError(
                f"{option} {directory} holds the splits {', '.join(kinds)}; name one of them, such "
                f"as '{directory}/{kinds[-1]}-*{suffix}'"
            )
        if found:
            return found
    raise ConfigError(
        f"{option} {directory} holds no .parquet, .arrow or .jsonl file; give the directory of a "
        "dataset (of save_to_disk, or of such files), or one file"
    )


def _json(file: Path, option: str) -> dict[str, Any]:
    try:
        value = json.loads(read_settings(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{option}: {file} cannot be read ({error}); repair it") from error
    return value if isinstance(value, dict) else {}


def _open_file(file: Path, option: str) -> _JsonRows | _TableRows:
    try:
        if file.suffix in _TABLES:
            require_file(file)
            return _TableRows(file, _table(file, option))
        return _JsonRows(file)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{option} {file} cannot be read ({reason})") from error


def _table(file: Path, option: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"{option} {file}: pyarrow is needed to read it, and is not installed; pip install "
            "pyarrow, or convert the file to JSONL"
        ) from error
    try:
        if file.suffix == ".parquet":
            return pyarrow.parquet.read_table(file)
        source = pyarrow.memory_map(str(file))
        try:
            return pyarrow.ipc.open_stream(source).read_all()
        except pyarrow.ArrowInvalid:  # the other of Arrow's two formats
            source.seek(0)
            return pyarrow.ipc.open_file(source).read_all()
    except pyarrow.ArrowException as error:
        kind = "a Parquet" if file.suffix == ".parquet" else "an Arrow"
        problem = " ".join(str(error).split())[:300]
        raise ConfigError(f"{option} {file} is not {kind} file ({problem})") from error
