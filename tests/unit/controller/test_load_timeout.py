"""How long engines and models may take to start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plugin.cluster.model_source import ModelSource
from plugin.config import JobConfig
from plugin.controller.job import load_timeout

GB = 10**9


@pytest.mark.parametrize(
    ("given", "nbytes", "on_gpus", "seconds"),
    [
        ({}, 0, False, 300),
        # Qwen3-30B-A3B in bfloat16: 61 GB at 10 s each, and vLLM's graphs.
        ({"rollout_engine": "vllm"}, 61 * GB, True, 300 + 610 + 600),
        ({"rollout_engine": "sglang"}, 61 * GB, True, 300 + 610 + 600),
        ({"rollout_engine": "vllm"}, 61 * GB, False, 300 + 610),
        ({}, 61 * GB, True, 300 + 610),  # transformers compiles nothing
        ({"start_timeout": 10.0}, GB, False, 10 + 10),
        ({"load_timeout": 77.0, "rollout_engine": "vllm"}, 61 * GB, True, 77),
    ],
)
def test_a_large_model_has_time_to_load_and_an_engine_to_compile(
    given: dict[str, Any], nbytes: int, on_gpus: bool, seconds: float
) -> None:
    assert load_timeout(JobConfig(**given), nbytes, on_gpus=on_gpus) == seconds


def test_the_size_is_that_of_the_weights_on_disk(tmp_path: Path) -> None:
    for number, size in enumerate((3, 4)):
        (tmp_path / f"model-{number}.safetensors").write_bytes(bytes(size))
    (tmp_path / "tokenizer.json").write_bytes(bytes(99))
    assert ModelSource({}, str(tmp_path)).nbytes == 7
    assert ModelSource({}).nbytes == 0


def test_without_a_time_of_its_own_a_start_has_that_of_the_actors() -> None:
    assert JobConfig(start_timeout=9.0).load_patience == 9.0
    assert JobConfig(start_timeout=9.0, load_timeout=5.0).load_patience == 5.0
