"""The tensors that a rank holds between steps, each storage counted once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from plugin.ragged import Integers


def resident_bytes(chunks: Sequence[Any], optimizer: Any | None) -> dict[str, int]:
    """Bytes of parameters, gradients, main parameters and optimizer state of a trainer.

    Parameters and gradients count with the padding of the buffers that they lie in.

    chunks: in DDP where they are trained; optimizer: Megatron's, None of a model that is not
    """
    seen: set[int] = set()
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    buffers = []
    if optimizer is not None:
        buffers = [b for c in chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
    main, state = _optimizer_tensors(optimizer)
    return {
        "parameters": _new_bytes(parameters, seen),
        "gradients": _new_bytes([buffer.grad_data for buffer in buffers], seen),
        "main_parameters": _new_bytes(main, seen),
        "optimizer": _new_bytes(state, seen),
    }


def count_parameters(chunks: Sequence[Any]) -> int:
    """How many numbers the parameters of the chunks are, without padding of buffers."""
    return sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())


def count_trained(chunks: Sequence[Any]) -> int:
    """Those of them that are trained: adapters alone, where there are some."""
    return sum(p.numel() for chunk in chunks for p in chunk.parameters() if p.requires_grad)


def _optimizer_tensors(optimizer: Any | None) -> tuple[list[Tensor], list[Tensor]]:
    """What the optimizer updates, and its state about it."""
    if optimizer is None:
        return [], []
    main, state = [], []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        if inner is None:
            continue  # a rank whose shard of the buffers is padding alone
        main += [p for group in inner.param_groups for p in group["params"]]
        state += [t for entry in inner.state.values() for t in entry.values()]
    # Adam's step counters have no dimension; they lie in host memory.
    return main, [t for t in state if isinstance(t, Tensor) and t.dim()]


def shard_sizes(chunks: Sequence[Any], *, experts: bool) -> Integers:
    """[ranks] numbers in the optimizer shard of every rank of a data parallel group.

    The distributed optimizer cuts each bucket into equal shards. Padding at a bucket's end and
    between parameters is in the gradient buffer of every rank and in the optimizer state of none,
    so ranks of one stage may hold different amounts.

    experts: of the experts' parameters, which have their own data parallel group
    """
    buffers = [b for c in chunks for b in (c.expert_parallel_buffers if experts else c.buffers)]
    total = np.zeros(1, np.int64)
    for buffer in buffers:
        ranges = np.array([place[:2] for place in buffer.param_index_map.values()]).T
        ranks = np.arange(buffer.data_parallel_group.size())[:, None]
        for bucket in buffer.buckets:
            size = bucket.grad_data.numel() // len(ranks)
            first = bucket.offset + ranks * size
            held = np.minimum(ranges[1], first + size) - np.maximum(ranges[0], first)
            total = total + held.clip(min=0).sum(axis=1)
    return total


def _new_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total
