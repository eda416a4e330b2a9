"""What the ranks of the GPU suites run around a test's body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from plugin.config.device_defaults import Capabilities, on_device
from plugin.megatron_backend.parallel_groups import ParallelGroups


def on_local_layers(fn: Callable[..., Any], groups: ParallelGroups, *args: Any) -> Any:
    """`fn(groups, *args)` on this rank's GPU, in float32 on local layers unless the body says otherwise."""
    import torch

    from plugin.megatron_backend.model import builder, device_settings

    assert torch.cuda.is_available(), "a rank of a GPU suite sees no GPU"
    # TF32 rounds factors to 11 bits, which five digits do not survive.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    exact = {"on_device": as_on_cpu}
    with mock.patch.multiple(builder, **exact), mock.patch.multiple(device_settings, **exact):
        return fn(groups, *args)


def as_on_cpu(config: Any, found: Capabilities) -> Any:
    """`on_device` with the defaults of CPU; what a body sets explicitly stays."""
    if config.transformer_impl == "transformer_engine" or config.train_dtype == "bfloat16":
        return on_device(config, found)
    return on_device(config, Capabilities())
