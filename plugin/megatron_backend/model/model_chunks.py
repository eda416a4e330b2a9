"""What is inside the chunks of a built model: the `GPTModel`, its tensors, its experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from plugin.megatron_backend.parallel_groups import ParallelGroups


def unwrap(chunk: torch.nn.Module) -> Any:
    """The `GPTModel` inside DDP or precision wrappers."""
    inner: Any = chunk
    while hasattr(inner, "module"):
        inner = inner.module
    return inner


def model_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a chunk, adapters left out, and its routers' biases, which are not trained."""
    for name, parameter in model.named_parameters():
        if ".lora." not in name:
            yield name, parameter
    for name, tensor in model.named_buffers():
        if name.endswith(".router.expert_bias"):
            yield name, tensor


def experts_per_rank(model: Any, groups: ParallelGroups) -> int:
    return (model.config.num_moe_experts or 0) // groups.ep_size


def gather_updated_weights(chunks: Sequence[Any]) -> None:
    """Complete the weights that the next forward pass would gather; a collective.

    With --overlap-param-gather an optimizer step leaves every rank with its own share updated.
    """
    for chunk in chunks:
        if getattr(chunk, "use_forward_hook", False):
            chunk.start_param_sync(force_sync=True)
