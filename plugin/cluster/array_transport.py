"""Batches, shares and rollouts as a few flat arrays, which Ray moves without copying them.

An array that comes out of the object store is a view of memory that all processes of a node share.
It is read-only: code that wants to write makes a copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from plugin.batch_types import FIELDS, PER_RESPONSE_TOKEN, RolloutBatch
from plugin.environments.trajectory import Rollouts
from plugin.megatron_backend.step.batch_share import BatchShare
from plugin.ragged import Ragged
from plugin.vocabulary_ids import KEPT_COUNTS

Arrays = dict[str, np.ndarray]
Record = TypeVar("Record", BatchShare, Rollouts)
#: Fields of long stretches of equal values, which travel as [2, stretches]: values and lengths.
_IN_STRETCHES = {"weight_versions"}


def batch_to_arrays(batch: RolloutBatch) -> Arrays:
    """One array per column: scalars as they are, per-token columns end to end."""
    arrays = {
        name: (values.values if isinstance(values, Ragged) else values).numpy()
        for name, values in batch.columns.items()
    }
    for name in arrays.keys() & _IN_STRETCHES:
        values = arrays[name]
        starts = np.flatnonzero(np.append(True, values[1:] != values[:-1])[: len(values)])
        arrays[name] = np.stack([values[starts], np.diff(np.append(starts, len(values)))])
    return arrays


def batch_from_arrays(arrays: Mapping[str, np.ndarray]) -> RolloutBatch:
    """The batch that `batch_to_arrays` took apart; its tensors are views of the arrays."""
    columns: dict[str, Any] = {}
    for name, array in arrays.items():
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
