"""Batches and trajectories as a few flat arrays.

A rollout batch is thousands of small tensors, which are slow to serialize one by one; Ray moves NumPy arrays
without copying. Every field of the table becomes one array, and comes back with its shape and dtype.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plugin.batch_types import FIELDS, RolloutBatch
from plugin.rollout.conversation.trajectory import Segment, Trajectory
from plugin.rollout.engines.protocol import Generation

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


def trajectories_to_arrays(answers: Sequence[Sequence[Trajectory]]) -> Arrays:
    """An engine's answer: every segment end to end, with the counts to take them apart again."""
    flat = [trajectory for answer in answers for trajectory in answer]
    segments = [segment for trajectory in flat for segment in trajectory.segments]
    generations = [segment.generation for segment in segments]
    arrays: Arrays = {
        "counts": np.asarray([len(answer) for answer in answers], np.int64),
        "segments": np.asarray([len(t.segments) for t in flat], np.int64),
        "turns": np.asarray([t.turns for t in flat], np.int64),
        "rewards": np.asarray([math.nan if t.reward is None else t.reward for t in flat]),
        "errors": np.asarray([t.error or "" for t in flat], np.str_),
        "prompt_lengths": np.asarray([len(s.prompt) for s in segments], np.int64),
        "prompts": np.asarray([token for s in segments for token in s.prompt], np.int64),
        "lengths": np.asarray([g.tokens.numel() for g in generations], np.int64),
        "versions": np.asarray([g.weight_version for g in generations], np.int64),
        "stopped": np.asarray([g.finish_reason == "stop" for g in generations], np.bool_),
        "tokens": _joined([g.tokens for g in generations]),
        "masked": np.asarray([s.loss_mask is not None for s in segments], np.bool_),
        "masks": _joined([s.loss_mask for s in segments if s.loss_mask is not None]),
    }
    log_probs = [g.log_probs for g in generations if g.log_probs is not None]
    routes = [g.routed_experts for g in generations if g.routed_experts is not None]
    if log_probs:
        arrays["log_probs"] = _joined(log_probs)
    if routes:
        arrays["routed_experts"] = _joined(routes)
        arrays["route_lengths"] = np.asarray([len(route) for route in routes], np.int64)
    return arrays


def trajectories_from_arrays(arrays: Mapping[str, np.ndarray]) -> list[list[Trajectory]]:
    """The answer that `trajectories_to_arrays` took apart."""
    segments = iter(_segments_from_arrays(arrays))
    columns = (arrays[name].tolist() for name in ("segments", "rewards", "errors", "turns"))
    flat = iter(
        [
            Trajectory(
                tuple(itertools.islice(segments, count)),
                None if math.isnan(reward) else reward,
                error or None,
                turns,
            )
            for count, reward, error, turns in zip(*columns, strict=True)
        ]
    )
    return [list(itertools.islice(flat, count)) for count in arrays["counts"].tolist()]


def _segments_from_arrays(arrays: Mapping[str, np.ndarray]) -> list[Segment]:
    lengths = arrays["lengths"].tolist()
    nothing: list[Tensor | None] = [None] * len(lengths)
    tokens = _split(arrays["tokens"], lengths)
    prompts = _split(arrays["prompts"], arrays["prompt_lengths"].tolist())
    log_probs = _split(arrays["log_probs"], lengths) if "log_probs" in arrays else nothing
    routes = nothing
    if "routed_experts" in arrays:
        routes = _split(arrays["routed_experts"], arrays["route_lengths"].tolist())
    masked = arrays["masked"].tolist()
    of_masked = [length for length, has in zip(lengths, masked, strict=True) if has]
    masks = iter(_split(arrays["masks"], of_masked))
    versions, stopped = arrays["versions"].tolist(), arrays["stopped"].tolist()
    return [
        Segment(
            tuple(prompts[i].tolist()),
            Generation(
                tokens[i],
                "stop" if stopped[i] else "length",
                versions[i],
                log_probs[i],
                routes[i],
            ),
            next(masks) if masked[i] else None,
        )
        for i in range(len(lengths))
    ]


def _joined(tensors: Sequence[Tensor]) -> np.ndarray:
    return torch.cat(list(tensors)).numpy() if tensors else np.zeros(0, np.int64)


def _split(array: np.ndarray, lengths: Sequence[int]) -> list[Any]:
    # Arrays from the object store are read-only; torch wants memory it may write to.
    return list(torch.from_numpy(array.copy()).split(list(lengths)))
