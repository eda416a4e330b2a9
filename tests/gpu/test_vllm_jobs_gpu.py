"""Jobs with vLLM on GPUs: weights reach its workers by broadcast over NCCL, through the object store, and by CUDA IPC after sleep."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm_rollouts.small_job import check_steps, train

NUM_GPUS = 4

pytestmark = pytest.mark.timeout(1500)

#: As with vLLM in bfloat16 on CPU.
BF16_MISMATCH = 1e-2
VLLM = ("--rollout-engine", "vllm", "--rollout-dtype", "bfloat16")


@pytest.mark.parametrize("way", ["broadcast", "object-store"])
@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe"])
def test_new_weights_reach_both_workers_of_an_engine(tmp_path: Path, model: str, way: str) -> None:
    flags = (*VLLM, "--embedded-model", model, "--weight-sync", way)
    flags += ("--pipeline-model-parallel-size", "2", "--rollout-num-gpus-per-engine", "2")
    lines = train(tmp_path / "run", *flags, on_gpus=True)
    check_steps(lines, BF16_MISMATCH)
    assert {line["weight_sync"] for line in lines} == {way}


@pytest.mark.parametrize("level", ["1", "2"])
def test_an_engine_that_sleeps_while_the_trainer_trains_wakes_with_the_new_weights(
    tmp_path: Path, level: str
) -> None:
    flags = (*VLLM, "--colocate", "--colocate-sleep-level", level)
    lines = train(tmp_path / "run", *flags, on_gpus=True)
    check_steps(lines, BF16_MISMATCH)
    assert {line["weight_sync"] for line in lines} == {"ipc"}
