"""Reads dumps, ours and those of others, in blocks of bounded size.

Formats: a directory of our Parquet files or single ones; `.pt` (torch.load with weights_only),
`.npz` (without pickle) and `.jsonl`. Columns are found by name:

| column | also accepted | per sample |
|---|---|---|
| rollout_log_probs | inference_logprobs, behavior_log_probs, sampling_logprobs | [response] |
| train_log_probs | log_probs, old_log_probs, trainer_logprobs | [response]; missing = cur |
| cur_log_probs | current_log_probs, new_log_probs | [response]; missing = train |
| loss_mask | loss_masks, response_mask, mask | [response]; missing = all ones |
| advantages | advantage | [response] or one number; missing = ones |
| tokens | token_ids, unconcat_tokens | [prompt + response] |
| response_length | response_lengths | one number; needed by flat arrays |
| weight_versions | weight_version, policy_version | [response] or one number |
| step, trainer_version | | one number |
| rollout_routed_experts, rollout_routed_weights | | [prompt + response, moe layers, topk] |

`.jsonl`: one object per sample. `.pt`: a list of dicts (samples), or a dict of columns; a column is
a list of 1-D tensors, a padded [N, S] tensor (loss_mask says what is padding) or a flat [T] tensor
with response_length. `.npz`: a column is a padded [N, S] or a flat [T] array.

What cannot be read is named in `problems` with file and row and left out; the rest is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plugin.errors import BatchError, ConfigError
from plugin.json_lines import read_json_lines, require_file
from plugin.observe.log_prob_dump import ROUTES, dump_files
from plugin.tools.compare.dump_columns import (
    BLOCK_TOKENS,
    KNOWN_NAMES,
    PER_RESPONSE,
    Columns,
    DumpBlock,
    Ragged,
    blocks_of,
    known_columns,
    short,
)

#: columns, the number of their first row in the file or of each, the bytes of input they stand for
Piece = tuple[Columns, int | NDArray[Any], int]


@dataclass
class Dump:
    """Files to read and what went wrong so far."""

    files: list[Path]
    problems: list[str] = field(default_factory=list)

    def total_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    def blocks(self) -> Iterator[tuple[DumpBlock, int]]:
        """(block, bytes of input it stands for); the bytes add up to about `total_bytes`."""
        for path in self.files:
            try:
                require_file(path)
                for columns, rows, size in _READERS[path.suffix](path, self.problems):
                    for block in blocks_of(columns, path, rows, self.problems):
                        yield block, size
                        size = 0
            except (BatchError, OSError, ValueError, EOFError, MemoryError, RuntimeError) as error:
                self.problems.append(f"{path}: not readable ({short(error)}); skipped")
            except Exception as error:
                # Decoders of corrupt files raise errors of struct, zipfile, pickle, zlib, ...
                self.problems.append(
                    f"{path}: corrupt ({type(error).__name__}: {short(error)}); skipped"
                )


def open_dump(paths: Sequence[str | Path]) -> Dump:
    """Find the files; a path that is not a dump is a `ConfigError`."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            steps = [file for _, file in dump_files(path)]
            others = [file for file in sorted(path.iterdir()) if file.suffix in _READERS]
            if not steps and not others:
                raise ConfigError(
                    f"{path} holds no dump; expected step-*.parquet, .pt, .npz or .jsonl files"
                )
            found += steps or others
        elif not path.exists():
            raise ConfigError(f"{path} does not exist; give a dump file or directory")
        elif path.suffix not in _READERS:
            raise ConfigError(
                f"{path} ends in {path.suffix!r}; a dump is one of {', '.join(sorted(_READERS))}"
            )
        else:
            found.append(path)
    return Dump(found)


def _read_parquet(path: Path, problems: list[str]) -> Iterator[Piece]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        groups = file.metadata.num_row_groups
        metadata = file.schema_arrow.metadata or {}
        wanted = [name for name in file.schema_arrow.names if name in KNOWN_NAMES]
        first_row = 0
        for group in range(groups):
            rows = file.metadata.row_group(group).num_rows
            try:
                table = file.read_row_group(group, columns=wanted, use_threads=False)
                columns = known_columns({name: _arrow_column(table[name]) for name in wanted})
                if metadata.get(b"cur_log_probs") == b"train_log_probs":
                    columns["cur_log_probs"] = columns["train_log_probs"]
                yield columns, first_row, path.stat().st_size // groups
            except (pa.ArrowException, OSError, ValueError) as error:
                problems.append(
                    f"{path}: rows {first_row} to {first_row + rows - 1} are not readable "
                    f"({short(error)}); skipped"
                )
            first_row += rows


def _arrow_column(column: Any) -> Any:
    """[N] scalars, or a `Ragged` that shares the values of a list column."""
    import pyarrow as pa

    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pa.array([], column.type)
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        lengths = np.diff(array.offsets.to_numpy(zero_copy_only=False)).astype(np.int64)
        return Ragged(array.flatten().to_numpy(zero_copy_only=False), lengths)
    return array.to_numpy(zero_copy_only=False)


def _read_jsonl(path: Path, problems: list[str]) -> Iterator[Piece]:
    samples: dict[int, Any] = {}
    tokens, size = 0, 0
    for line in read_json_lines(path):
        size += line.size
        row = line.number - 1
        if line.value is None:
            problems.append(f"{path}: row {row}: {line.problem}; skipped")
            continue
        samples[row] = known_columns(line.value)
        values = samples[row].get("rollout_log_probs")
        tokens += len(values) if isinstance(values, list) else 0
        if tokens >= BLOCK_TOKENS:
            yield from _stack_samples(samples, size, path, problems)
            samples, tokens, size = {}, 0, 0
    yield from _stack_samples(samples, size, path, problems)


def _read_torch(path: Path, problems: list[str]) -> Iterator[Piece]:
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise BatchError(
            f"torch.load(weights_only=True) refuses it: {short(error)}; save plain tensors, lists "
            "and numbers"
        ) from error
    size = path.stat().st_size
    if isinstance(content, (list, tuple)):
        samples = {
            row: known_columns(item) if isinstance(item, Mapping) else {}
            for row, item in enumerate(content)
        }
        yield from _stack_samples(samples, size, path, problems)
    elif isinstance(content, Mapping):
        yield _array_columns(content), 0, size
    else:
        raise BatchError(f"it holds a {type(content).__name__}; expected samples or columns")


def _read_npz(path: Path, problems: list[str]) -> Iterator[Piece]:
    with np.load(path, allow_pickle=False) as archive:
        content = {name: archive[name] for name in archive.files if name in KNOWN_NAMES}
    yield _array_columns(content), 0, path.stat().st_size


_READERS = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".pt": _read_torch,
    ".npz": _read_npz,
}


def _array_columns(content: Mapping[str, Any]) -> Columns:
    """Columns from any of the three spellings: lists, padded [N, S], flat [T] with lengths."""
    found = known_columns(content)
    lengths = found.get("response_length")
    sizes = None if lengths is None else np.asarray(lengths, np.int64)
    columns: Columns = {}
    for name, values in found.items():
        per_token = name in (*PER_RESPONSE, "tokens")
        if name == "weight_versions" and all(np.ndim(value) == 0 for value in values):
            per_token = sizes is not None and len(values) != len(sizes)
        if isinstance(values, (list, tuple)) and per_token:
            columns[name] = Ragged.of([np.asarray(value).reshape(-1) for value in values])
        elif np.ndim(values) == 2:
            padded = np.asarray(values)
            width = padded.shape[1]
            row_sizes = np.full(len(padded), width) if sizes is None else np.minimum(sizes, width)
            columns[name] = Ragged(padded[np.arange(width) < row_sizes[:, None]], row_sizes)
        elif not per_token or sizes is None:
            columns[name] = np.asarray(values).reshape(-1)
        elif name != "tokens":  # the lengths of prompts are unknown
            columns[name] = Ragged(np.asarray(values).reshape(-1), sizes)
    return columns


def _stack_samples(
    samples: Mapping[int, Columns], size: int, path: Path, problems: list[str]
) -> Iterator[Piece]:
    """Columns from one mapping per row; a sample that does not convert is named and left out."""
    good: dict[int, Columns] = {}
    for row, sample in samples.items():
        try:
            good[row] = _sample_arrays(sample)
        except (BatchError, TypeError, ValueError, OverflowError) as error:
            problems.append(f"{path}: row {row}: {short(error)}; skipped")
    if good:
        columns: Columns = {}
        for name in set.intersection(*map(set, good.values())):
            values = [sample[name] for sample in good.values()]
            is_list = isinstance(values[0], np.ndarray)
            columns[name] = Ragged.of(values) if is_list else np.array(values, np.int64)
        yield columns, np.array(list(good)), size


def _sample_arrays(sample: Mapping[str, Any]) -> Columns:
    """One sample's columns: arrays per token, integers per sample."""
    if "rollout_log_probs" not in sample:
        raise BatchError("it has no rollout_log_probs")
    count = len(sample["rollout_log_probs"])
    train = sample.get("train_log_probs", sample.get("cur_log_probs"))
    if train is None:
        raise BatchError("it has neither train_log_probs nor cur_log_probs")
    values = {
        "rollout_log_probs": sample["rollout_log_probs"],
        "train_log_probs": train,
        "cur_log_probs": sample.get("cur_log_probs", train),
        "advantages": sample.get("advantages", 1.0),
    }
    arrays: Columns = {
        name: np.asarray(value, np.float32).reshape(-1) for name, value in values.items()
    }
    if arrays["advantages"].size == 1:
        arrays["advantages"] = np.repeat(arrays["advantages"], count)
    arrays["loss_mask"] = np.asarray(sample.get("loss_mask", np.ones(count))).reshape(-1)
    if "tokens" in sample:
        arrays["tokens"] = np.asarray(sample["tokens"], np.int64).reshape(-1)
    if "weight_versions" in sample:
        versions = np.array(sample["weight_versions"], np.int64)
        arrays["weight_versions"] = np.repeat(versions, count) if versions.ndim == 0 else versions
    for name in (name for name in ROUTES if name in sample):
        routes = np.asarray(sample[name])
        if routes.ndim != 3:
            raise BatchError(f"{name} has shape {list(routes.shape)}, not [tokens, layers, topk]")
        arrays |= {name: routes.reshape(-1)}
        arrays |= {"routed_layers": routes.shape[1], "routed_topk": routes.shape[2]}
    for name in ("step", "trainer_version"):
        if name in sample:
            arrays[name] = int(np.int64(sample[name]))  # refuses what 64 bits do not hold
    return arrays
