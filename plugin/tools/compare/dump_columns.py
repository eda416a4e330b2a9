"""The columns of a dump: their names, their checks, and their cut into blocks of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plugin.errors import BatchError
from plugin.observe.log_prob_dump import ROUTES

#: Our name of a column -> names that other frameworks give it.
ALIASES: dict[str, tuple[str, ...]] = {
    "rollout_log_probs": ("inference_logprobs", "behavior_log_probs", "sampling_logprobs"),
    "train_log_probs": ("log_probs", "old_log_probs", "trainer_logprobs"),
    "cur_log_probs": ("current_log_probs", "new_log_probs"),
    "loss_mask": ("loss_masks", "response_mask", "mask"),
    "advantages": ("advantage",),
    "tokens": ("token_ids", "unconcat_tokens"),
    "response_length": ("response_lengths",),
    "step": (),
    "trainer_version": (),
    "weight_versions": ("weight_version", "policy_version"),
    "rollout_routed_experts": (),
    "rollout_routed_weights": (),
    "train_routed_experts": (),
    "routed_layers": (),
    "routed_topk": (),
    "kept_counts": (),
    "kept_ids": (),
}
KNOWN_NAMES = frozenset(name for key, others in ALIASES.items() for name in (key, *others))
LOG_PROBS = ("rollout_log_probs", "train_log_probs", "cur_log_probs")
PER_RESPONSE = (*LOG_PROBS, "loss_mask", "advantages", "weight_versions")
#: Tokens that are read in one piece; larger files of other frameworks should be cut.
BLOCK_TOKENS = 1 << 18


class Ragged(NamedTuple):
    """A column of lists: the values of all rows in one array, and the length of every row."""

    values: NDArray[Any]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[NDArray[Any]]) -> Ragged:
        values = np.concatenate(rows) if rows else np.zeros(0, np.float32)
        return cls(values, np.array([len(row) for row in rows], np.int64))

    def keep(self, good: NDArray[np.bool_]) -> Ragged:
        return Ragged(self.values[np.repeat(good, self.lengths)], self.lengths[good])

    def rows(self, chosen: slice) -> list[NDArray[Any]]:
        """One view per row."""
        ends = np.cumsum(self.lengths)[chosen]
        return [
            self.values[end - n : end] for end, n in zip(ends, self.lengths[chosen], strict=True)
        ]


#: name -> `Ragged` for a list column, [N] for a scalar
Columns = dict[str, Any]


@dataclass
class DumpBlock:
    """Samples of one dump, flat over response tokens (T) of N samples, 0 at masked positions.

    lengths: [N] int64; mask: [T] bool; rollout, train, cur, advantages: [T] float32
    step, trainer_version: [N] int64; weight_versions: [T] int64; -1 where unknown
    ids: [T] int64 ids of the response tokens, where dumped
    sequences: one [prompt + response] int64 array per sample, where dumped
    routes: name -> one [total, layers, topk] array per sample, only where dumped
    kept: kept_counts [response] and kept_ids of truncated sampling, per sample, where dumped
    """

    lengths: NDArray[np.int64]
    mask: NDArray[np.bool_]
    rollout: NDArray[np.float32]
    train: NDArray[np.float32]
    cur: NDArray[np.float32]
    advantages: NDArray[np.float32]
    step: NDArray[np.int64]
    trainer_version: NDArray[np.int64]
    weight_versions: NDArray[np.int64]
    ids: NDArray[np.int64] | None = None
    sequences: list[NDArray[np.int64]] | None = None
    routes: dict[str, list[NDArray[Any]]] = field(default_factory=dict)
    kept: dict[str, list[NDArray[Any]]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return int(self.mask.size)

    def batch_columns(self) -> dict[str, list[Any]]:
        """One entry per sample, named as in `RolloutBatch`."""
        flat: dict[str, NDArray[Any]] = {
            "rollout_log_probs": self.rollout,
            "log_probs": self.train,
            "loss_masks": self.mask,
            "weight_versions": self.weight_versions,
        }
        if self.ids is not None:
            flat["unconcat_tokens"] = self.ids
        columns = {
            name: Ragged(values, self.lengths).rows(slice(None)) for name, values in flat.items()
        }
        return {**columns, **self.routes}


def known_columns(content: Mapping[str, Any]) -> Columns:
    """The known columns of `content` under our names; our own name comes before another's."""
    found: Columns = {}
    for name, others in ALIASES.items():
        for key in (name, *others):
            if name not in found and key in content and content[key] is not None:
                found[name] = content[key]
    return found


def blocks_of(
    columns: Columns, path: Path, rows: int | NDArray[Any], problems: list[str]
) -> Iterator[DumpBlock]:
    """Check columns row by row, drop what is broken, and cut the rest into blocks of bounded size.

    rows: number of the first row in the file, or of each
    """
    for name in ("rollout_log_probs", "train_log_probs"):
        if name not in columns and not (name == "train_log_probs" and "cur_log_probs" in columns):
            raise BatchError(
                f"it has no column {name} (nor {', '.join(ALIASES[name])}); found "
                f"{', '.join(sorted(columns)) or 'none of the known columns'}"
            )
    columns = _with_defaults(columns)
    count = len(columns["rollout_log_probs"].lengths)
    numbers = rows + np.arange(count) if isinstance(rows, int) else rows
    columns = _good_rows(columns, path, numbers, problems)
    lengths = columns["rollout_log_probs"].lengths
    ends = np.cumsum(lengths)
    start, tokens = 0, 0
    for i, length in enumerate(lengths.tolist()):
        tokens += length
        if tokens >= BLOCK_TOKENS or i + 1 == len(lengths):
            yield _block(columns, slice(start, i + 1), slice(ends[i] - tokens, ends[i]))
            start, tokens = i + 1, 0


def _with_defaults(columns: Columns) -> Columns:
    columns = dict(columns)
    columns.setdefault("train_log_probs", columns.get("cur_log_probs"))
    columns.setdefault("cur_log_probs", columns["train_log_probs"])
    flat, lengths = columns["rollout_log_probs"]
    columns.setdefault("loss_mask", Ragged(np.ones(flat.size, np.bool_), lengths))
    advantages = columns.get("advantages", np.ones(len(lengths)))
    if not isinstance(advantages, Ragged):
        advantages = Ragged(np.repeat(advantages.astype(np.float32), lengths), lengths)
    columns["advantages"] = advantages
    for name in ("step", "trainer_version"):
        if len(columns.get(name, ())) != len(lengths):
            columns[name] = np.full(len(lengths), -1, np.int64)
    versions = columns.get("weight_versions")
    if not isinstance(versions, Ragged):
        # One number per sample, as dumps of whole responses have it.
        if versions is None or len(versions) != len(lengths):
            versions = np.full(len(lengths), -1)
        columns["weight_versions"] = Ragged(np.repeat(versions, lengths), lengths)
    return columns


def _good_rows(columns: Columns, path: Path, numbers: NDArray[Any], problems: list[str]) -> Columns:
    """The rows whose columns have one length and finite values where the mask is 1."""
    lengths = columns["rollout_log_probs"].lengths
    good = np.ones(len(lengths), np.bool_)
    for name in PER_RESPONSE:
        other = columns[name].lengths
        if len(other) != len(lengths):
            raise BatchError(f"{name} has {len(other)} rows but rollout_log_probs {len(lengths)}")
        for i in np.flatnonzero(good & (other != lengths)):
            problems.append(
                f"{path}: row {numbers[i]}: {name} has {other[i]} values for {lengths[i]} response "
                "tokens; skipped"
            )
        good &= other == lengths
    columns, numbers = _kept(columns, good), numbers[good]
    mask, lengths = columns["loss_mask"]
    good = np.ones(len(lengths), np.bool_)
    for name in (*LOG_PROBS, "advantages"):
        low, high = (-1e4, 0.1) if name in LOG_PROBS else (-1e8, 1e8)
        values = columns[name].values
        bad = np.flatnonzero(~((values >= low) & (values <= high)) & (mask != 0))
        for row in np.unique(np.searchsorted(np.cumsum(lengths), bad, side="right")):
            if good[row]:
                problems.append(
                    f"{path}: row {numbers[row]}: {name} is not finite (or is a log-prob above "
                    "0.1) where the loss mask is 1; skipped"
                )
            good[row] = False
    return _kept(columns, good)


def _kept(columns: Columns, good: NDArray[np.bool_]) -> Columns:
    if good.all():
        return columns
    return {
        name: column.keep(good) if isinstance(column, Ragged) else column[good]
        for name, column in columns.items()
        if len(column.lengths if isinstance(column, Ragged) else column) == len(good)
    }


def _block(columns: Columns, rows: slice, tokens: slice) -> DumpBlock:
    lengths = columns["rollout_log_probs"].lengths[rows]
    mask = columns["loss_mask"].values[tokens] != 0
    values = {}
    for name in (*LOG_PROBS, "advantages"):
        column = columns[name].values[tokens].astype(np.float32, copy=False)
        values[name.removesuffix("_log_probs")] = np.where(mask, column, np.float32(0))
    versions = {name: columns[name][rows].astype(np.int64) for name in ("step", "trainer_version")}
    versions["weight_versions"] = columns["weight_versions"].values[tokens].astype(np.int64)
    ids = sequences = None
    if isinstance(columns.get("tokens"), Ragged):
        samples = columns["tokens"].rows(rows)
        if len(samples) == len(lengths) and all(map(np.greater_equal, map(len, samples), lengths)):
            parts = [row[len(row) - n :] for row, n in zip(samples, lengths, strict=True)]
            ids = np.concatenate(parts).astype(np.int64)
            sequences = [row.astype(np.int64, copy=False) for row in samples]
    routes = {
        name: [
            _signed(route).reshape(-1, layers, topk)
            for route, layers, topk in zip(
                columns[name].rows(rows),
                columns["routed_layers"][rows].tolist(),
                columns["routed_topk"][rows].tolist(),
                strict=True,
            )
        ]
        for name in ROUTES
        if isinstance(columns.get(name), Ragged) and "routed_layers" in columns
    }
    kept = {
        name: columns[name].rows(rows)
        for name in ("kept_counts", "kept_ids")
        if isinstance(columns.get(name), Ragged)
    }
    return DumpBlock(
        lengths, mask, **values, **versions, ids=ids, sequences=sequences, routes=routes, kept=kept
    )


def _signed(routes: NDArray[Any]) -> NDArray[Any]:
    """Routes with -1 for "no route", which older dumps wrote as 65535 in 16 unsigned bits."""
    if routes.dtype != np.uint16:
        return routes
    return np.where(routes == np.iinfo(np.uint16).max, -1, routes.astype(np.int32))


def short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
