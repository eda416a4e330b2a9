"""The distributed optimizer's state as pieces of whole tensors, stored by the ranks that have them.

A data parallel rank holds a run of consecutive elements of every flattened parameter. A run of a
matrix is at most three rectangles: the end of a row, whole rows, the beginning of a row. They are
stored as they are, under the names and in the shapes of Megatron's `fully_reshardable` format, so
nothing is gathered: every rank writes and reads its share, and another layout reads the rectangles
that overlap with its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from plugin.errors import CheckpointError

_KEYS = {"param": "fp32_param"}

#: By the number of a parameter and the name of its state: the pieces of this rank, in order.
Pieces = dict[int, dict[str, list[ShardedTensor]]]


def rectangles(
    shape: tuple[int, ...], start: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of the rectangles that make up elements `start` to `end`, in their order.

    Elements 2 to 9 of a [4, 3] tensor: the last one of row 0 and rows 1 and 2 whole.
    """
    if start >= end:
        return
    if len(shape) == 1:
        yield (start,), (end - start,)
        return
    row = math.prod(shape[1:])
    zeros = (0,) * (len(shape) - 1)
    if start % row:
        stop = min(end, (start // row + 1) * row)
        first = start // row
        for offset, size in rectangles(shape[1:], start % row, stop - first * row):
            yield (first, *offset), (1, *size)
        start = stop
    if whole := max(0, end // row - start // row):
        yield (start // row, *zeros), (whole, *shape[1:])
        start += whole * row
    for offset, size in rectangles(shape[1:], 0, end - start):
        yield (start // row, *offset), (1, *size)


def optimizer_pieces(
    part: DistributedOptimizer, models: dict[str, Any], *, loading: bool
) -> Pieces:
    """This rank's pieces of an optimizer's state; with `loading`, new tensors on the host to fill.

    models: the sharded state of the model chunks that it optimizes
    """
    sharded = {id(entry.data): entry for entry in nested_values(models) if hasattr(entry, "data")}
    pieces: Pieces = {}
    for number, parameter, start, end in _held(part):
        parts = list(_regular_parts(sharded[id(parameter)], parameter))
        pieces[number] = {
            name: list(_cut(f"optimizer.state.{_KEYS.get(name, name)}", state, parts, start, end))
            for name, state in _states(part, parameter).items()
        }
        if loading:
            for piece in (piece for found in pieces[number].values() for piece in found):
                piece.data = torch.empty(piece.local_shape, dtype=piece.dtype)
    return pieces


@torch.no_grad()
def load_pieces(part: DistributedOptimizer, loaded: dict[int, dict[str, list[Tensor]]]) -> None:
    """Put the tensors of `optimizer_pieces`, which have been read, into the optimizer."""
    for number, parameter, start, end in _held(part):
        states = {
            name: torch.cat([tensor.flatten() for tensor in tensors])
            for name, tensors in loaded[number].items()
        }
        states.setdefault("param", parameter.detach().flatten()[start:end])
        part._set_main_param_and_optimizer_states(parameter, states)


def _held(part: DistributedOptimizer) -> Iterator[tuple[int, torch.nn.Parameter, int, int]]:
    """Number, parameter, and first and last element of the run of it that this rank optimizes."""
    maps = (
        bucket["param_map"] for ranges in part.gbuf_ranges for b in ranges.values() for bucket in b
    )
    runs = ((parameter, found["param"]) for each in maps for parameter, found in each.items())
    for number, (parameter, run) in enumerate(runs):
        yield number, parameter, run.start, run.end


def _states(part: DistributedOptimizer, parameter: torch.nn.Parameter) -> dict[str, Tensor]:
    """The flat tensors of a parameter's run that are stored."""
    states = part._get_main_param_and_optimizer_states(parameter)
    states.pop("step", None)  # stored once, in the metadata
    if parameter.dtype is torch.float32:
        del states["param"]  # a view of the model's weights, which are stored already
    return states


def _regular_parts(entry: Any, parameter: Tensor) -> Iterator[tuple[int, ShardedTensor]]:
    """Where a parameter's parts begin in it, and each as a part of a whole stored tensor.

    Usually it is one; a fused projection of two has one of each.
    """
    is_factory = isinstance(entry, ShardedTensorFactory)
    for piece in nested_values(entry.build()) if is_factory else [entry]:
        same = piece.data.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
        if not (same and piece.data.is_contiguous()):
            raise CheckpointError(
                f"{piece.key} is stored in another order than the distributed optimizer holds it; "
                "turn off --use-distributed-optimizer"
            )
        yield piece.data.storage_offset() - parameter.storage_offset(), piece


def _cut(
    prefix: str, state: Tensor, parts: list[tuple[int, ShardedTensor]], start: int, end: int
) -> Iterator[ShardedTensor]:
    """The elements `start` to `end` of a parameter, which `state` holds, as pieces of `parts`."""
    for begin, part in parts:
        low, high = max(start, begin), min(end, begin + math.prod(part.local_shape))
        done, axes = low - start, part.prepend_axis_num
        for offset, size in rectangles(tuple(part.local_shape), low - begin, high - begin):
            count = math.prod(size)
            shape = (1,) * axes + size
            yield ShardedTensor(
                key=f"{prefix}.{part.key}",
                data=state.detach()[done : done + count].view(shape),
                dtype=state.dtype,
                local_shape=shape,
                global_shape=part.global_shape,
                global_offset=(
                    *part.global_offset[:axes],
                    *(at + by for at, by in zip(part.global_offset[axes:], offset, strict=True)),
                ),
                axis_fragmentations=None,  # no regular grid
                # Of the ranks that hold this parameter, each data parallel one has other elements.
                replica_id=(*part.replica_id[:-1], 0),
                allow_shape_mismatch=part.allow_shape_mismatch,
            )
            done += count
