"""The fixtures of tests/parallel on CUDA ranks over NCCL: the tests' bodies are the same, the device is not.

Every rank has its own GPU. The shared bodies compare layouts to five digits in float32, which Transformer Engine's
attention does not compute in, so they run on the same local layers as on CPU; `test_transformer_engine.py`
covers the layers that a real run uses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from tests.gpu.gpu_ranks import on_local_layers
from tests.parallel.rank_pool import RankPool
from tests.suites import declared_gpus


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the numbers, what this machine has too few GPUs for."""
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.path.parent.name != "gpu":
            continue
        needed = declared_gpus(item.path)
        if needed is None or needed > available:
            reason = f"needs {needed} GPUs and this machine has {available}"
            item.add_marker(pytest.mark.skip(reason=reason))


class GpuRankPool(RankPool):
    """Warm workers, one per GPU, that run jobs on local layers unless a test asks for others."""

    def run_ranks(
        self, fn: Callable[..., Any], world_size: int, *args: Any, **options: Any
    ) -> list[Any]:
        """As `RankPool.run_ranks`, on CUDA."""
        return super().run_ranks(partial(on_local_layers, fn), world_size, *args, **options)

    run_real_ranks = RankPool.run_ranks


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[GpuRankPool]:
    """One set of warm worker processes for the whole session."""
    # torch must look for GPUs without initializing CUDA: workers are forked from the process that looks.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    pool = GpuRankPool()
    yield pool
    pool.close()


@pytest.fixture
def run_ranks(rank_pool: GpuRankPool) -> Callable[..., list[Any]]:
    """The fixture that the shared bodies ask for."""
    return rank_pool.run_ranks


@pytest.fixture
def run_real_ranks(rank_pool: GpuRankPool) -> Callable[..., list[Any]]:
    """Ranks with the layers that `--transformer-impl auto` chooses on a GPU."""
    return rank_pool.run_real_ranks
