"""The tensors that a rank holds between steps, each storage counted once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor


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
    return main, [t for t in state if isinstance(t, Tensor)]


def _new_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total
