"""What the ranks of the GPU suites run around a test's body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from plugin.megatron_backend.parallel_groups import ParallelGroups


def on_local_layers(fn: Callable[..., Any], groups: ParallelGroups, *args: Any) -> Any:
    """`fn(groups, *args)` on this rank's GPU, on local layers although Transformer Engine may be there."""
    import torch

    from plugin.megatron_backend import trainer
    from plugin.megatron_backend.model import builder as model_builder

    assert torch.cuda.is_available(), "a rank of a GPU suite sees no GPU"
    never = {"uses_transformer_engine": lambda choice: False}
    with mock.patch.multiple(model_builder, **never), mock.patch.multiple(trainer, **never):
        return fn(groups, *args)
