"""What vLLM takes of a GPU that the trainer has, too."""

from __future__ import annotations

from typing import Any

import pytest

from plugin.config import JobConfig
from plugin.engines.vllm.startup import shared_memory_options


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("max_num_batched_tokens=8192", 0.8),
        ("gpu_memory_utilization=0.6", 0.6),
        ("kv_cache_memory_bytes=1000", None),  # a size wins over a share
    ],
)
def test_beside_the_trainer_it_takes_four_fifths_unless_it_is_told(
    given: str, expected: float | None
) -> None:
    config = JobConfig(rollout_engine="vllm", colocate=True, vllm_args=(given,))
    arguments: dict[str, Any] = config.vllm_arguments()
    chosen = shared_memory_options(arguments) | arguments
    assert chosen.get("gpu_memory_utilization") == expected
