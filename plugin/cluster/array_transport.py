"""Batches, shares and rollouts as a few flat arrays, which Ray moves without copying them.

An array that comes out of the object store is a view of memory that all processes of a node share.
It is read-only: code that wants to write makes a copy.

What is heavy stays where it was made: an engine's answer is a head, which the driver reads, and
parts with the columns `BULK`, of which the driver only has references, as of what ranks compute.
What the driver has itself it stores once per rollout (`store`), and ranks fetch their samples.
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
from plugin.errors import BatchLost
from plugin.megatron_backend.step.batch_share import BatchShare
from plugin.megatron_backend.step.loss_scaling import loss_token_counts
from plugin.ragged import Integers, Ragged, Stored
from plugin.vocabulary_ids import HEAD_IDS, HEAD_LOG_PROBS, KEPT_COUNTS, KEPT_IDS

Arrays = dict[str, np.ndarray]
Record = TypeVar("Record", BatchShare, Rollouts)
#: Fields that often are long stretches of equal values: these travel as [2, stretches], values and
#: lengths, where that is smaller.
_IN_STRETCHES = {"weight_versions": np.int64, "advantages": np.float32}
#: Columns that never visit the driver, and that ranks fetch for their samples only.
BULK = (
    *("rollout_routed_experts", "rollout_routed_weights"),
    *(KEPT_COUNTS, KEPT_IDS, HEAD_IDS, HEAD_LOG_PROBS),
)
#: The names of those that an answer has, in its head.
_STORED = "//stored"
#: Smaller types that tokens and masks travel in, with what these hold.
_NARROW = {"unconcat_tokens": torch.int32, "loss_masks": torch.uint8}
#: A stored object is at least so large where a rank has as much: it fetches whole objects, and Ray
#: keeps those up to 100 kB in the memory of their owner.
BLOCK_BYTES = 1 << 20


def batch_to_arrays(batch: RolloutBatch) -> Arrays:
    """One array per column: scalars as they are, per-token columns end to end.

    A column that is elsewhere stays there; its references travel.
    """
    arrays: Arrays = {
        name: (values.values if isinstance(values, Ragged) else values).numpy()
        for name, values in batch.here().columns.items()
    }
    for name in arrays.keys() & _IN_STRETCHES.keys():
        values = arrays[name]
        starts = np.flatnonzero(np.append(True, values[1:] != values[:-1])[: len(values)])
        if values.dtype == _IN_STRETCHES[name] and 16 * len(starts) < values.nbytes:
            arrays[name] = np.stack([values[starts], np.diff(np.append(starts, len(values)))])
    return arrays | cast(Arrays, batch.stored)


def batch_from_arrays(arrays: Mapping[str, np.ndarray]) -> RolloutBatch:
    """The batch that `batch_to_arrays` took apart; its tensors are views of the arrays."""
    columns: dict[str, Any] = {}
    for name, array in arrays.items():
        if isinstance(array, Stored):
            columns[name] = array
            continue
        if name in _IN_STRETCHES and array.ndim == 2:
            array = np.repeat(array[0].astype(_IN_STRETCHES[name]), array[1].astype(np.int64))
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
    light = RolloutBatch({n: values for n, values in batch.columns.items() if n not in names})
    head = to_arrays(replace(rollouts, batch=_narrowed(light)))
    if not names:
        return head, [{} for _ in range(parts)]
    head |= {_STORED: np.array(names)}
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


def store(
    batch: RolloutBatch, blocks: Sequence[Integers], put: Callable[[Arrays], Any] | None = None
) -> RolloutBatch:
    """The batch with every per-token column in the object store, and the counts that it leaves.

    blocks: the samples of each object; every sample is in one
    put: stores an object and returns a reference; Ray's if not given
    """
    if put is None:
        import ray

        put = ray.put
    lengths = ("total_lengths", "response_lengths")
    here = {n: v for n, v in batch.columns.items() if isinstance(v, Ragged)}
    if "loss_masks" in here:
        batch = batch.with_column("loss_token_counts", loss_token_counts(batch))
    if not here:
        return batch
    moved = _narrowed(RolloutBatch({**{name: batch.columns[name] for name in lengths}, **here}))
    objects = [put(batch_to_arrays(moved.select(block))) for block in blocks]
    return RolloutBatch({**batch.columns, **dict.fromkeys(here, stored_in(objects, blocks))})


def stored_in(objects: Sequence[Any], blocks: Sequence[Integers]) -> Stored:
    """A column of the objects: block by block the numbers of the samples that are in them."""
    count = sum(len(block) for block in blocks)
    owner, place = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for number, block in enumerate(blocks):
        owner[block], place[block] = number, np.arange(len(block))
    return Stored(objects, owner, place)


def narrow_arrays(batch: RolloutBatch) -> Arrays:
    """`batch_to_arrays` with tokens and masks in the smaller types, which `fetched` undoes."""
    return batch_to_arrays(_narrowed(batch))


def _narrowed(batch: RolloutBatch) -> RolloutBatch:
    """The batch with tokens and masks in the smaller types, unless a value does not fit."""
    for name, dtype in _NARROW.items():
        column = batch.columns.get(name)
        if not isinstance(column, Ragged) or column.values.dtype != torch.int64:
            continue
        low, high = (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        if not len(column.values) or (column.values.min() >= low and column.values.max() <= high):
            batch = batch.with_column(name, column.like(column.values.to(dtype)))
    return batch


def fetched(
    batch: RolloutBatch,
    *,
    layers: Sequence[int] | None = None,
    get: Callable[[list[Any]], list[Arrays]] | None = None,
) -> RolloutBatch:
    """The batch with every column here, tokens and masks in their own types again.

    A column that is one stretch of one object is a view of it.

    layers: the MoE layers whose routes are wanted, of stored ones; None = all
    get: the objects of references; Ray's if not given
    """
    columns = dict(batch.columns)
    known: dict[int, list[RolloutBatch]] = {}
    for name, stored in batch.stored.items():
        if id(stored) not in known:
            objects = (get or _of_ray)(stored.objects)
            known[id(stored)] = [batch_from_arrays(arrays) for arrays in objects]
        parts = [part.columns[name] for part in known[id(stored)]]
        if layers is not None and FIELDS[name].shape == "routes":
            parts = [part.like(_of_layers(part.values, layers)) for part in parts]
        column = _taken(parts, stored)
        if column.values.dtype == _NARROW.get(name):
            column = column.like(column.values.to(FIELDS[name].dtype))
        columns[name] = column
    return RolloutBatch(columns)


def _of_ray(references: list[Any]) -> list[Arrays]:
    """What is stored; a `BatchLost` where it is lost with its node."""
    import ray

    try:
        return cast(list[Arrays], ray.get(references))
    except ray.exceptions.ObjectLostError as error:
        raise BatchLost(f"a part of the batch is lost with the node it was on: {error}") from error


def _taken(parts: Sequence[Ragged], stored: Stored) -> Ragged:
    """The column of the samples, of the objects' columns; neighbors are taken together."""
    owner, place = stored.owner, stored.place
    if not len(owner):
        return Ragged(parts[0].values[:0], owner)  # the first tells shape and type
    begins = (np.diff(owner, prepend=-1) != 0) | (np.diff(place, prepend=-1) != 1)
    starts = np.flatnonzero(begins)
    counts = np.diff(np.append(starts, len(owner)))
    rows = [
        parts[owner[start]].select(place[start] + np.arange(count))
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
    ]
    return rows[0] if len(rows) == 1 else Ragged.concatenated(rows)


def only(batch: RolloutBatch, *names: str) -> RolloutBatch:
    """The batch's lengths and these columns of it, here."""
    lengths = ("total_lengths", "response_lengths")
    return fetched(RolloutBatch({name: batch.columns[name] for name in (*lengths, *names)}))


def _of_layers(routes: Tensor, layers: Sequence[int]) -> Tensor:
    """The routes of these layers; neighbors are a view, so that only what is used is copied."""
    if layers[-1] - layers[0] == len(layers) - 1:
        return routes[:, layers[0] : layers[-1] + 1]
    return routes[:, list(layers)]
