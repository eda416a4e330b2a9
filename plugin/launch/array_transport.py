"""Batches and trajectories as a few flat arrays.

A rollout batch is thousands of small tensors, which are slow to serialize one by one; Ray moves
NumPy arrays without copying. Every field of the table becomes one array, and comes back with its
shape and dtype.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from plugin.batch_types import FIELDS, RolloutBatch, RolloutSample
from plugin.rollout.conversation.trajectory import Trajectory

Arrays = dict[str, np.ndarray]


def batch_to_arrays(batch: RolloutBatch) -> Arrays:
    """One array per column: scalars as they are, per-token columns end to end."""
    arrays: Arrays = {}
    for name, values in batch.columns.items():
        if FIELDS[name].shape != "scalar":
            tensors = [torch.as_tensor(value) for value in values]
            if len({tensor.dtype for tensor in tensors}) > 1 and FIELDS[name].shape == "routes":
                # Engines may differ in the type of their routes; torch joins not every pair.
                tensors = [tensor.to(torch.int64) for tensor in tensors]
            arrays[name] = torch.cat(tensors).numpy() if tensors else np.zeros(0, np.int64)
        elif FIELDS[name].dtype == torch.int64:
            arrays[name] = np.asarray([int(value) for value in values], np.int64)
        else:
            arrays[name] = np.asarray([float(value) for value in values], np.float32)
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
            # Arrays from the object store are read-only; torch wants memory it may write to.
            lengths = responses if shape == "response" else totals
            columns[name] = list(torch.from_numpy(array.copy()).split(lengths))
    return RolloutBatch(columns)


def trajectories_to_arrays(answers: Sequence[Sequence[Trajectory]]) -> Arrays:
    """An engine's answer: its samples as a batch, with the counts to take it apart again."""
    flat = [trajectory for answer in answers for trajectory in answer]
    samples = [sample for trajectory in flat for sample in trajectory.samples]
    return {
        **batch_to_arrays(RolloutBatch.from_samples(samples)),
        "/counts": np.asarray([len(answer) for answer in answers], np.int64),
        "/samples": np.asarray([len(t.samples) for t in flat], np.int64),
        "/rewards": np.asarray([math.nan if t.reward is None else t.reward for t in flat]),
        "/errors": np.asarray([t.error or "" for t in flat], np.str_),
        "/turns": np.asarray([t.turns for t in flat], np.int64),
        "/truncated": np.asarray([t.truncated for t in flat], np.bool_),
    }


def trajectories_from_arrays(arrays: Mapping[str, np.ndarray]) -> list[list[Trajectory]]:
    """The answer that `trajectories_to_arrays` took apart."""
    columns = batch_from_arrays({n: a for n, a in arrays.items() if n[0] != "/"}).columns
    nothing = itertools.repeat(None)
    samples = (
        RolloutSample(
            tokens,
            length,
            mask,
            weight_version=version,
            rollout_log_probs=lp,
            routed_experts=routes,
        )
        for tokens, length, mask, version, lp, routes in zip(
            columns["unconcat_tokens"],
            columns["response_lengths"],
            columns["loss_masks"],
            columns["weight_versions"],
            columns.get("rollout_log_probs", nothing),
            columns.get("rollout_routed_experts", nothing),
            strict=False,
        )
    )
    names = ("/samples", "/rewards", "/errors", "/turns", "/truncated")
    flat = iter(
        [
            Trajectory(
                tuple(itertools.islice(samples, count)),
                None if math.isnan(reward) else reward,
                error or None,
                turns,
                truncated,
            )
            for count, reward, error, turns, truncated in zip(
                *(arrays[name].tolist() for name in names), strict=True
            )
        ]
    )
    return [list(itertools.islice(flat, count)) for count in arrays["/counts"].tolist()]
