"""Batches, shares and rollouts as a few flat arrays, which Ray moves without copying them.

An array that comes out of the object store is a view of memory that all processes of a node share.
It is read-only: code that wants to write makes a copy.

What is heavy stays where an engine made it: its answer is a head, which the driver reads, and parts
with the columns `BULK`, of which the driver only has references.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from plugin.batch_types import FIELDS, PER_RESPONSE_TOKEN, RolloutBatch
from plugin.environments.trajectory import Rollouts
from plugin.megatron_backend.step.batch_share import BatchShare
from plugin.ragged import Integers, Ragged, Stored
from plugin.vocabulary_ids import HEAD_IDS, HEAD_LOG_PROBS, KEPT_COUNTS, KEPT_IDS

Arrays = dict[str, np.ndarray]
Record = TypeVar("Record", BatchShare, Rollouts)
#: Fields of long stretches of equal values, which travel as [2, stretches]: values and lengths.
_IN_STRETCHES = {"weight_versions"}
#: Columns that never visit the driver, and that ranks fetch for their samples only.
BULK = (
    *("rollout_routed_experts", "rollout_routed_weights"),
    *(KEPT_COUNTS, KEPT_IDS, HEAD_IDS, HEAD_LOG_PROBS),
)
#: The names of those that an answer has, in its head.
_STORED = "//stored"


def batch_to_arrays(batch: RolloutBatch) -> Arrays:
    """One array per column: scalars as they are, per-token columns end to end.

    A column that is elsewhere stays there; its references travel.
    """
    arrays: Arrays = {
        name: (values.values if isinstance(values, Ragged) else values).numpy()
        for name, values in batch.here().columns.items()
    }
    for name in arrays.keys() & _IN_STRETCHES:
        values = arrays[name]
        starts = np.flatnonzero(np.append(True, values[1:] != values[:-1])[: len(values)])
        arrays[name] = np.stack([values[starts], np.diff(np.append(starts, len(values)))])
    return arrays | cast(Arrays, batch.stored)


def batch_from_arrays(arrays: Mapping[str, np.ndarray]) -> RolloutBatch:
    """The batch that `batch_to_arrays` took apart; its tensors are views of the arrays."""
    columns: dict[str, Any] = {}
    for name, array in arrays.items():
        if isinstance(array, Stored):
            columns[name] = array
            continue
        array = np.repeat(*array) if name in _IN_STRETCHES else array
        shape, values = FIELDS[name].shape, tensor_view(array)
        if shape == "scalar":
            columns[name] = values
        elif shape == "kept":
            counts = Ragged(tensor_view(arrays[KEPT_COUNTS]), arrays["response_lengths"])
            columns[name] = Ragged(values, counts.sums())
        else:
            lengths = arrays["response_lengths" if shape in PER_RESPONSE_TOKEN else "total_lengths"]
            columns[name] = Ragged(values, lengths)
    return RolloutBatch(columns)


def tensor_view(array: np.ndarray) -> Tensor:
    """A tensor that shares the array's memory, which may be read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(array)


def to_arrays(record: BatchShare | Rollouts) -> Arrays:
    """The columns of the record's batch, and its other fields with a slash before their names."""
    names = [field.name for field in fields(record) if field.name != "batch"]
    rest = {f"/{name}": np.asarray(getattr(record, name)) for name in names}
    return batch_to_arrays(record.batch) | rest


def from_arrays(kind: type[Record], arrays: Mapping[str, np.ndarray]) -> Record:
    """The share or the rollouts that `to_arrays` took apart; tensors are views of the arrays."""
    batch = batch_from_arrays({name: a for name, a in arrays.items() if name[0] != "/"})
    rest: dict[str, Any] = {
        name[1:]: a if a.ndim else a.item() for name, a in arrays.items() if name[0] == "/"
    }
    return kind(batch, **rest)


def apart(rollouts: Rollouts, parts: int) -> tuple[Arrays, list[Arrays]]:
    """The head of an engine's answer, and its bulk columns in `parts` objects, often empty ones.

    Trajectory t of every group is in part t modulo `parts`: with one part per trajectory of a group
    a rank fetches no sample that it does not train on.
    """
    batch = rollouts.batch
    names = [name for name in BULK if name in batch]
    if not names:
        return to_arrays(rollouts), [{} for _ in range(parts)]
    light = RolloutBatch({n: values for n, values in batch.columns.items() if n not in names})
    head = to_arrays(replace(rollouts, batch=light)) | {_STORED: np.array(names)}
    kept = ("total_lengths", "response_lengths", *names)
    bulk = RolloutBatch({name: batch.columns[name] for name in kept})
    owner = _part_of(rollouts, parts)
    return head, [
        batch_to_arrays(bulk.select(np.flatnonzero(owner == part))) for part in range(parts)
    ]


def rejoined(head: Arrays, references: Sequence[Any]) -> Rollouts:
    """The rollouts of an engine's answer; `references`: to its parts, which stay where they are."""
    rollouts = from_arrays(Rollouts, {n: array for n, array in head.items() if n != _STORED})
    if _STORED not in head:
        return rollouts
    owner = _part_of(rollouts, len(references))
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=len(references))
    place = np.zeros(len(owner), np.int64)
    place[order] = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    stored = Stored(references, owner, place)
    columns = rollouts.batch.columns | dict.fromkeys(head[_STORED].tolist(), stored)
    return replace(rollouts, batch=RolloutBatch(columns))


def _part_of(rollouts: Rollouts, parts: int) -> Integers:
    """[N] which part of an answer each sample is in."""
    firsts = np.flatnonzero(np.diff(rollouts.groups, prepend=-1))
    counts = np.diff(np.append(firsts, len(rollouts)))
    in_group = np.arange(len(rollouts)) - np.repeat(firsts, counts)
    return np.repeat(in_group % parts, rollouts.samples)


def fetched(
    batch: RolloutBatch,
    *,
    layers: Sequence[int] | None = None,
    get: Callable[[list[Any]], list[Arrays]] | None = None,
) -> RolloutBatch:
    """The batch with every column here.

    layers: the MoE layers whose routes are wanted, of stored ones; None = all
    get: the objects of references; Ray's if not given
    """
    if get is None:
        import ray

        get = ray.get
    columns = dict(batch.columns)
    known: dict[int, list[RolloutBatch]] = {}
    for name, stored in batch.stored.items():
        if id(stored) not in known:
            known[id(stored)] = [batch_from_arrays(arrays) for arrays in get(stored.objects)]
        parts = [part.columns[name] for part in known[id(stored)]]
        if layers is not None and FIELDS[name].shape == "routes":
            parts = [part.like(_of_layers(part.values, layers)) for part in parts]
        pairs = zip(stored.owner.tolist(), stored.place.tolist(), strict=True)
        # The first tells shape and type where this has no samples.
        rows = [parts[0].values[:0], *(parts[owner][place] for owner, place in pairs)]
        columns[name] = Ragged(torch.cat(rows), [len(row) for row in rows[1:]])
    return RolloutBatch(columns)


def _of_layers(routes: Tensor, layers: Sequence[int]) -> Tensor:
    """The routes of these layers; neighbors are a view, so that only what is used is copied."""
    if layers[-1] - layers[0] == len(layers) - 1:
        return routes[:, layers[0] : layers[-1] + 1]
    return routes[:, list(layers)]
