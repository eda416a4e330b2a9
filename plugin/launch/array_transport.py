"""Batches and generations as a few flat arrays.

A rollout batch is thousands of small tensors, which are slow to serialise one by one; Ray moves NumPy arrays
without copying. Every field of the table becomes one array, and comes back with its shape and dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plugin.batch_types import FIELDS, RolloutBatch
from plugin.rollout.engine_protocol import Generation

Arrays = dict[str, np.ndarray]


def batch_to_arrays(batch: RolloutBatch) -> Arrays:
    """One array per column: scalars as they are, per-token columns end to end."""
    arrays: Arrays = {}
    for name, values in batch.columns.items():
        if FIELDS[name].shape == "scalar":
            kind = np.int64 if FIELDS[name].dtype == torch.int64 else np.float32
            arrays[name] = np.asarray(
                [float(v) if kind is np.float32 else int(v) for v in values], kind
            )
        else:
            arrays[name] = _joined([torch.as_tensor(value) for value in values])
    return arrays


def batch_from_arrays(arrays: Mapping[str, np.ndarray]) -> RolloutBatch:
    """The batch that `batch_to_arrays` took apart. Tensors are writable copies."""
    totals = arrays["total_lengths"].tolist()
    responses = arrays["response_lengths"].tolist()
    columns: dict[str, list[Any]] = {}
    for name, array in arrays.items():
        shape = FIELDS[name].shape
        if shape == "scalar":
            columns[name] = array.tolist()
        else:
            columns[name] = _split(array, responses if shape == "response" else totals)
    return RolloutBatch(columns)


def generations_to_arrays(answers: Sequence[Sequence[Generation]]) -> Arrays:
    """All generations of an engine's answer end to end, with the counts to take them apart again."""
    flat = [generation for answer in answers for generation in answer]
    arrays: Arrays = {
        "counts": np.asarray([len(answer) for answer in answers], np.int64),
        "lengths": np.asarray([g.tokens.numel() for g in flat], np.int64),
        "versions": np.asarray([g.weight_version for g in flat], np.int64),
        "stopped": np.asarray([g.finish_reason == "stop" for g in flat], np.bool_),
        "tokens": _joined([g.tokens for g in flat]),
    }
    log_probs = [g.log_probs for g in flat if g.log_probs is not None]
    routes = [g.routed_experts for g in flat if g.routed_experts is not None]
    if log_probs:
        arrays["log_probs"] = _joined(log_probs)
    if routes:
        arrays["routed_experts"] = _joined(routes)
        arrays["route_lengths"] = np.asarray([len(route) for route in routes], np.int64)
    return arrays


def generations_from_arrays(arrays: Mapping[str, np.ndarray]) -> list[list[Generation]]:
    """The answer that `generations_to_arrays` took apart."""
    lengths = arrays["lengths"].tolist()
    tokens = _split(arrays["tokens"], lengths)
    nothing: list[Tensor | None] = [None] * len(lengths)
    log_probs = _split(arrays["log_probs"], lengths) if "log_probs" in arrays else nothing
    routes = nothing
    if "routed_experts" in arrays:
        routes = _split(arrays["routed_experts"], arrays["route_lengths"].tolist())
    flat = [
        Generation(tokens[i], "stop" if stopped else "length", version, log_probs[i], routes[i])
        for i, (stopped, version) in enumerate(
            zip(arrays["stopped"].tolist(), arrays["versions"].tolist(), strict=True)
        )
    ]
    answers, start = [], 0
    for count in arrays["counts"].tolist():
        answers.append(flat[start : start + count])
        start += count
    return answers


def _joined(tensors: Sequence[Tensor]) -> np.ndarray:
    return torch.cat(list(tensors)).numpy() if tensors else np.zeros(0, np.int64)


def _split(array: np.ndarray, lengths: Sequence[int]) -> list[Any]:
    # Arrays from the object store are read-only; torch wants memory it may write to.
    return list(torch.from_numpy(array.copy()).split(list(lengths)))
