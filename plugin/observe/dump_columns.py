"""The columns of a dump: their names, their checks, and their cut into blocks of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plugin.errors import BatchError

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
    "weight_version": ("weight_versions", "policy_version"),
    "rollout_routed_experts": (),
    "train_routed_experts": (),
    "routed_layers": (),
    "routed_topk": (),
}
LOG_PROBS = ("rollout_log_probs", "train_log_probs", "cur_log_probs")
PER_RESPONSE = (*LOG_PROBS, "loss_mask", "advantages")
#: Read in one piece at most; larger files of other frameworks should be cut.
BLOCK_TOKENS = 1 << 18


@dataclass
class DumpBlock:
    """Samples of one dump, flat over response tokens (T) of N samples, masked positions zero_masked to 0.

    lengths: [N] int64; mask: [T] bool; rollout, train, cur, advantages: [T] float32
    step, trainer_version, weight_version: [N] int64, -1 where unknown
    ids: [T] int64 ids of the response tokens, where dumped
    routes: name -> one [total, layers, topk] array per sample, only where dumped
    """

    lengths: NDArray[np.int64]
    mask: NDArray[np.bool_]
    rollout: NDArray[np.float32]
    train: NDArray[np.float32]
    cur: NDArray[np.float32]
    advantages: NDArray[np.float32]
    step: NDArray[np.int64]
    trainer_version: NDArray[np.int64]
    weight_version: NDArray[np.int64]
    ids: NDArray[np.int64] | None = None
    routes: dict[str, list[NDArray[Any]]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return int(self.mask.size)

    def per_sample(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """A flat array [T] as one view per sample."""
        return np.split(values, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []


def blocks_of(
    columns: Mapping[str, Any], path: Path, rows: int | NDArray[Any], problems: list[str]
) -> Iterator[DumpBlock]:
    """Check columns row by row, drop what is broken, and cut the rest into blocks of bounded size.

    columns: (flat values, lengths) per list column, [N] per scalar; rows: number of the first row, or of each
    """
    for name in ("rollout_log_probs", "train_log_probs"):
        if name not in columns and not (name == "train_log_probs" and "cur_log_probs" in columns):
            raise BatchError(
                f"it has no column {name} (nor {', '.join(ALIASES[name])}); found "
                f"{', '.join(sorted(columns)) or 'none of the known columns'}"
            )
    complete = _completed(dict(columns))
    lengths = complete["rollout_log_probs"][1]
    numbers = rows + np.arange(len(lengths)) if isinstance(rows, int) else rows
    good = _good_rows(complete, lengths, path, numbers, problems)
    starts = {name: _starts(complete[name][1]) for name in PER_RESPONSE}
    kept = np.flatnonzero(good)
    for part in _parts(lengths[kept]):
        yield _block(complete, starts, kept[part])


def _completed(columns: dict[str, Any]) -> dict[str, Any]:
    """Columns that may be missing, filled in."""
    columns.setdefault("train_log_probs", columns.get("cur_log_probs"))
    columns.setdefault("cur_log_probs", columns["train_log_probs"])
    flat, lengths = columns["rollout_log_probs"]
    columns.setdefault("loss_mask", (np.ones(flat.size, np.bool_), lengths))
    advantages = columns.get("advantages")
    if advantages is None:
        columns["advantages"] = (np.ones(flat.size, np.float32), lengths)
    elif not isinstance(advantages, tuple):
        columns["advantages"] = (np.repeat(advantages.astype(np.float32), lengths), lengths)
    for name in ("step", "trainer_version", "weight_version"):
        values = columns.get(name)
        if values is None or len(values) != len(lengths):
            columns[name] = np.full(len(lengths), -1, np.int64)
    return columns


def _good_rows(
    columns: Mapping[str, Any],
    lengths: NDArray[np.int64],
    path: Path,
    numbers: NDArray[Any],
    problems: list[str],
) -> NDArray[np.bool_]:
    """bool [N]: rows whose columns have one length and finite values where the mask is 1."""
    good = np.ones(len(lengths), np.bool_)
    for name in PER_RESPONSE:
        other = columns[name][1]
        if len(other) != len(lengths):
            raise BatchError(f"{name} has {len(other)} rows but rollout_log_probs {len(lengths)}")
        for i in np.flatnonzero(good & (other != lengths)):
            problems.append(
                f"{path}: row {numbers[i]}: {name} has {other[i]} values for {lengths[i]} response tokens; skipped"
            )
        good &= other == lengths
    for name in (*LOG_PROBS, "advantages"):
        for row in _rows_with_bad_values(columns, name, good):
            problems.append(
                f"{path}: row {numbers[row]}: {name} is not finite (or is a log-prob above 0.1) where the loss "
                "mask is 1; skipped"
            )
            good[row] = False
    return good


def _rows_with_bad_values(
    columns: Mapping[str, Any], name: str, good: NDArray[np.bool_]
) -> list[int]:
    values, lengths = columns[name]
    with np.errstate(invalid="ignore"):
        fine = np.abs(values) <= (1e4 if name in LOG_PROBS else 1e8)
        if name in LOG_PROBS:
            fine &= values <= 0.1
    if bool(fine.all()):
        return []
    ends = np.cumsum(lengths)
    mask, mask_lengths = columns["loss_mask"]
    mask_starts = _starts(mask_lengths)
    rows = np.unique(np.searchsorted(ends, np.flatnonzero(~fine), side="right"))
    bad = []
    for i in rows[good[rows]]:
        inside = fine[ends[i] - lengths[i] : ends[i]]
        selected = mask[mask_starts[i] : mask_starts[i] + lengths[i]] != 0
        if bool((~inside & selected).any()):
            bad.append(int(i))
    return bad


def _block(
    columns: Mapping[str, Any], starts: Mapping[str, NDArray[np.int64]], rows: NDArray[np.int64]
) -> DumpBlock:
    lengths = columns["rollout_log_probs"][1][rows]
    mask = _gather(columns, starts, "loss_mask", rows) != 0
    values = {}
    for name in (*LOG_PROBS, "advantages"):
        gathered = _gather(columns, starts, name, rows).astype(np.float32, copy=False)
        values[name] = np.where(mask, gathered, np.float32(0))
    return DumpBlock(
        lengths=lengths,
        mask=mask,
        rollout=values["rollout_log_probs"],
        train=values["train_log_probs"],
        cur=values["cur_log_probs"],
        advantages=values["advantages"],
        step=columns["step"][rows].astype(np.int64),
        trainer_version=columns["trainer_version"][rows].astype(np.int64),
        weight_version=columns["weight_version"][rows].astype(np.int64),
        ids=_response_ids(columns, rows),
        routes=_block_routes(columns, rows),
    )


def _gather(
    columns: Mapping[str, Any],
    starts: Mapping[str, NDArray[np.int64]],
    name: str,
    rows: NDArray[np.int64],
) -> NDArray[Any]:
    """The values of some rows, one after the other; a view where the rows are contiguous."""
    values, lengths = columns[name]
    if not len(rows):
        return values[:0]
    if rows[-1] - rows[0] + 1 == len(rows):
        return values[starts[name][rows[0]] : starts[name][rows[-1]] + lengths[rows[-1]]]
    parts = [values[starts[name][i] : starts[name][i] + lengths[i]] for i in rows]
    return np.concatenate(parts)


def _response_ids(columns: Mapping[str, Any], rows: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """The last `response length` ids of every row; None where a row has fewer than that."""
    if not isinstance(columns.get("tokens"), tuple):
        return None
    values, totals = columns["tokens"]
    lengths = columns["rollout_log_probs"][1]
    if len(totals) != len(lengths) or bool((totals[rows] < lengths[rows]).any()):
        return None
    ends = np.cumsum(totals)
    parts = [values[ends[i] - lengths[i] : ends[i]] for i in rows]
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


def _block_routes(columns: Mapping[str, Any], rows: NDArray[np.int64]) -> dict[str, list[Any]]:
    routes: dict[str, list[Any]] = {}
    for name in ("rollout_routed_experts", "train_routed_experts"):
        if not isinstance(columns.get(name), tuple) or "routed_layers" not in columns:
            continue
        values, lengths = columns[name]
        starts = _starts(lengths)
        routes[name] = [
            values[starts[i] : starts[i] + lengths[i]].reshape(
                -1, int(columns["routed_layers"][i]), int(columns["routed_topk"][i])
            )
            for i in rows
        ]
    return routes


def _parts(lengths: NDArray[np.int64]) -> Iterator[slice]:
    """Consecutive rows of about BLOCK_TOKENS tokens, at least one row each."""
    start, tokens = 0, 0
    for i, length in enumerate(lengths.tolist()):
        tokens += length
        if tokens >= BLOCK_TOKENS:
            yield slice(start, i + 1)
            start, tokens = i + 1, 0
    if start < len(lengths):
        yield slice(start, len(lengths))


def ragged(rows: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    lengths = np.array([len(row) for row in rows], np.int64)
    return (np.concatenate(rows) if rows else np.zeros(0, np.float32)), lengths


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.cumsum(lengths) - lengths


def first_named(content: Mapping[str, Any], name: str) -> Any:
    """The column under its own name or one of its other names."""
    for candidate in (name, *ALIASES.get(name, ())):
        if candidate in content:
            return content[candidate]
    return None


def canonical_name(name: str) -> str:
    """Our name of a column that may carry one of its other names."""
    return next((key for key, others in ALIASES.items() if name in others), name)


def known_names() -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for key in ALIASES for name in (key, *ALIASES[key])))


def short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
