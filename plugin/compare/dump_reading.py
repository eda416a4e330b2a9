"""Reads dumps, ours and those of others, in blocks of bounded size.

Formats: a directory of our Parquet files or single ones; `.pt` (torch.load with weights_only), `.npz`
(without pickle) and `.jsonl`. Columns are found by name:

| column | also accepted | per sample |
|---|---|---|
| rollout_log_probs | inference_logprobs, behavior_log_probs, sampling_logprobs | [response], required |
| train_log_probs | log_probs, old_log_probs, trainer_logprobs | [response], required unless cur is there |
| cur_log_probs | current_log_probs, new_log_probs | [response]; missing = train |
| loss_mask | loss_masks, response_mask, mask | [response]; missing = all ones |
| advantages | advantage | [response] or one number; missing = ones |
| tokens | token_ids, unconcat_tokens | [prompt + response] |
| response_length | response_lengths | one number; needed by flat arrays |
| step, trainer_version, weight_version | weight_versions, policy_version | one number |

`.jsonl`: one object per sample. `.pt`: a list of dicts (samples), or a dict of columns; a column is a list of
1-D tensors, a padded [N, S] tensor (loss_mask says what is padding) or a flat [T] tensor with response_length.
`.npz`: a column is a padded [N, S] or a flat [T] array.

What cannot be read is named in `problems` with file and row and left out; the rest is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plugin.compare.log_prob_dump import dump_files
from plugin.errors import BatchError, ConfigError
from plugin.observe.dump_columns import (
    ALIASES,
    BLOCK_TOKENS,
    PER_RESPONSE,
    DumpBlock,
    blocks_of,
    canonical_name,
    first_named,
    known_names,
    ragged,
    short,
)


@dataclass
class Dump:
    """Files to read and what went wrong so far."""

    files: list[Path]
    problems: list[str] = field(default_factory=list)

    def total_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    def blocks(self) -> Iterator[tuple[DumpBlock, int]]:
        """(block, bytes of input it stands for); the bytes of all blocks add up to about `total_bytes`."""
        for path in self.files:
            try:
                yield from _READERS[path.suffix](path, self.problems)
            except (BatchError, OSError, ValueError, EOFError, MemoryError, RuntimeError) as error:
                self.problems.append(f"{path}: not readable ({short(error)}); skipped")
            except Exception as error:
                # Decoders of corrupt files raise all sorts of things (struct, zipfile, pickle, zlib errors).
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


def _read_parquet(path: Path, problems: list[str]) -> Iterator[tuple[DumpBlock, int]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        groups = file.metadata.num_row_groups
        metadata = file.schema_arrow.metadata or {}
        share = path.stat().st_size // max(groups, 1)
        wanted = [name for name in known_names() if name in file.schema_arrow.names]
        first_row = 0
        for group in range(groups):
            rows = file.metadata.row_group(group).num_rows
            try:
                table = file.read_row_group(group, columns=wanted, use_threads=False)
                columns = {
                    canonical_name(name): _arrow_column(table[name]) for name in table.column_names
                }
                if metadata.get(b"cur_log_probs") == b"train_log_probs":
                    columns["cur_log_probs"] = columns["train_log_probs"]
                blocks = blocks_of(columns, path, first_row, problems)
                yield from _with_sizes(blocks, share)
            except (pa.ArrowException, OSError, ValueError) as error:
                problems.append(
                    f"{path}: rows {first_row} to {first_row + rows - 1} are not readable ({short(error)}); skipped"
                )
            first_row += rows


def _arrow_column(column: Any) -> Any:
    """A numpy array of scalars, or (flat values, lengths) of a list column, without copying the values."""
    import pyarrow as pa

    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pa.array([], column.type)
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        lengths = np.diff(array.offsets.to_numpy(zero_copy_only=False)).astype(np.int64)
        return array.flatten().to_numpy(zero_copy_only=False), lengths
    return array.to_numpy(zero_copy_only=False)


def _read_jsonl(path: Path, problems: list[str]) -> Iterator[tuple[DumpBlock, int]]:
    samples: list[dict[str, Any]] = []
    tokens, size = 0, 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for row, line in enumerate(file):
            size += len(line)
            try:
                sample = json.loads(line)
                if not isinstance(sample, dict):
                    raise ValueError("not an object")
            except ValueError:
                if line.strip():
                    problems.append(f"{path}: row {row} is not a complete JSON object; skipped")
                continue
            samples.append(sample | {"_row": row})
            tokens += _sample_tokens(sample)
            if tokens >= BLOCK_TOKENS:
                yield from _with_sizes(_sample_blocks(samples, path, problems), size)
                samples, tokens, size = [], 0, 0
    if samples:
        yield from _with_sizes(_sample_blocks(samples, path, problems), size)


def _sample_tokens(sample: Mapping[str, Any]) -> int:
    values = first_named(sample, "rollout_log_probs")
    return len(values) if isinstance(values, list) else 0


def _read_torch(path: Path, problems: list[str]) -> Iterator[tuple[DumpBlock, int]]:
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise BatchError(
            f"torch.load(weights_only=True) refuses it: {short(error)}; save plain tensors, lists and numbers"
        ) from error
    if isinstance(content, (list, tuple)):
        samples = [
            dict(item) | {"_row": row} if isinstance(item, Mapping) else {"_row": row}
            for row, item in enumerate(content)
        ]
        blocks = _sample_blocks(samples, path, problems)
    elif isinstance(content, Mapping):
        blocks = _column_blocks(content, path, problems)
    else:
        raise BatchError(f"it holds a {type(content).__name__}; expected samples or columns")
    yield from _with_sizes(blocks, path.stat().st_size)


def _read_npz(path: Path, problems: list[str]) -> Iterator[tuple[DumpBlock, int]]:
    with np.load(path, allow_pickle=False) as archive:
        content = {name: archive[name] for name in archive.files if name in known_names()}
    yield from _with_sizes(_column_blocks(content, path, problems), path.stat().st_size)


_READERS = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".pt": _read_torch,
    ".npz": _read_npz,
}


def _column_blocks(
    content: Mapping[str, Any], path: Path, problems: list[str]
) -> Iterator[DumpBlock]:
    """Blocks from columns in any of the three spellings: lists, padded [N, S], flat [T] with lengths."""
    columns: dict[str, Any] = {}
    lengths = first_named(content, "response_length")
    for name in ALIASES:
        values = first_named(content, name)
        if values is None:
            continue
        if isinstance(values, (list, tuple)) and name in (*PER_RESPONSE, "tokens"):
            columns[name] = ragged([np.asarray(value).reshape(-1) for value in values])
        elif np.ndim(values) == 2:
            columns[name] = _from_padded(np.asarray(values), lengths)
        elif name in (*PER_RESPONSE, "tokens") and lengths is not None:
            if name != "tokens":
                columns[name] = (np.asarray(values).reshape(-1), np.asarray(lengths, np.int64))
        else:
            columns[name] = np.asarray(values).reshape(-1)
    yield from blocks_of(columns, path, 0, problems)


def _from_padded(values: NDArray[Any], lengths: Any) -> Any:
    """Rows of a padded [N, S] array up to their response length; without lengths, whole rows."""
    if lengths is None:
        return values.reshape(-1), np.full(len(values), values.shape[1], np.int64)
    sizes = np.asarray(lengths, np.int64)
    keep = np.arange(values.shape[1])[None] < sizes[:, None]
    return values[keep], np.minimum(sizes, values.shape[1])


def _sample_blocks(
    samples: Sequence[Mapping[str, Any]], path: Path, problems: list[str]
) -> Iterator[DumpBlock]:
    """Blocks from one mapping per sample; a sample that does not convert is named and left out."""
    good: list[dict[str, Any]] = []
    for sample in samples:
        try:
            good.append(_converted_sample(sample))
        except (BatchError, TypeError, ValueError) as error:
            problems.append(f"{path}: row {sample['_row']}: {short(error)}; skipped")
    if not good:
        return
    names = set.intersection(*(set(sample) for sample in good)) - {"_row"}
    columns: dict[str, Any] = {}
    for name in names:
        if name in (*PER_RESPONSE, "tokens"):
            columns[name] = ragged([sample[name] for sample in good])
        else:
            columns[name] = np.array([sample[name] for sample in good], np.int64)
    rows = np.array([sample["_row"] for sample in good])
    yield from blocks_of(columns, path, rows, problems)


def _converted_sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    rollout = first_named(sample, "rollout_log_probs")
    if rollout is None:
        raise BatchError("it has no rollout_log_probs")
    count = len(rollout)
    train = first_named(sample, "train_log_probs")
    cur = first_named(sample, "cur_log_probs")
    if train is None and cur is None:
        raise BatchError("it has neither train_log_probs nor cur_log_probs")
    mask, advantages = first_named(sample, "loss_mask"), first_named(sample, "advantages")
    converted: dict[str, Any] = {
        "_row": sample["_row"],
        "rollout_log_probs": np.asarray(rollout, np.float32).reshape(-1),
        "train_log_probs": np.asarray(cur if train is None else train, np.float32).reshape(-1),
        "cur_log_probs": np.asarray(train if cur is None else cur, np.float32).reshape(-1),
        "loss_mask": np.ones(count, np.bool_) if mask is None else np.asarray(mask).reshape(-1),
        "advantages": np.ones(count, np.float32)
        if advantages is None
        else np.asarray(advantages, np.float32).reshape(-1),
    }
    if converted["advantages"].size == 1 and count != 1:
        converted["advantages"] = np.full(count, converted["advantages"][0], np.float32)
    for name in ("step", "trainer_version", "weight_version"):
        value = first_named(sample, name)
        if value is not None:
            converted[name] = int(value)
    tokens = first_named(sample, "tokens")
    if tokens is not None:
        converted["tokens"] = np.asarray(tokens, np.int64).reshape(-1)
    return converted


def _with_sizes(blocks: Iterator[DumpBlock], size: int) -> Iterator[tuple[DumpBlock, int]]:
    """Blocks with the input bytes they stand for: all of them on the first, so that nothing is counted twice."""
    for number, block in enumerate(blocks):
        yield block, size if number == 0 else 0
