"""Models with Transformer Engine's layers as rank 0 of a layout has them, without the other ranks and without GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from plugin.config import TrainerConfig
from plugin.config.device_defaults import Capabilities
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.tools.plan.fake_world import Traffic, fake_world
from tests.te.python_of_te import import_te

H100 = Capabilities(cuda=True, transformer_engine=True, compute_capability=(9, 0))


@contextmanager
def built(
    hf_config: Any, config: TrainerConfig, ranks: int = 1
) -> Iterator[tuple[Any, ParallelGroups]]:
    """The model of rank 0 of `ranks`, as an H100 with every package would have it."""
    import_te()
    from plugin.megatron_backend.model import builder, device_settings
    from plugin.tools.plan.planned_rank import parallel_sizes

    with (
        fake_world(0, ranks, parallel_sizes(config), Traffic()) as groups,
        mock.patch.object(builder, "capabilities", lambda: H100),
        mock.patch.object(device_settings, "capabilities", lambda: H100),
    ):
        # Its modules ask whether there is CUDA, and take what Megatron says for its device.
        with mock.patch.object(torch.cuda, "is_available", lambda: True):
            (model,) = builder.build_model(hf_config, config, groups)
        yield model, groups


def uses_te(model: Any) -> bool:
    """Whether the model's layers are Transformer Engine's."""
    return any(
        type(module).__module__.endswith("extensions.transformer_engine")
        for module in model.modules()
    )
