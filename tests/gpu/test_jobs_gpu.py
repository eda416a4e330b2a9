"""Whole jobs on GPUs: ranks and engines as Ray actors with GPUs of their own, or shared ones; weights by every way.

The defaults of CUDA hold: bfloat16, the distributed optimizer, Transformer Engine where it is installed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm_rollouts.small_job import check_steps, train

NUM_GPUS = 4

pytestmark = pytest.mark.timeout(1500)

#: Both sides round to 2^-8 relative in every layer; the same bound as with vLLM in bfloat16 on CPU.
BF16_MISMATCH = 1e-2
BF16 = ("--rollout-dtype", "bfloat16")
TWO_RANKS_TWO_ENGINES = ("--tensor-model-parallel-size", "2", "--num-rollout-engines", "2")


@pytest.mark.parametrize("way", ["broadcast", "object-store"])
def test_two_tensor_parallel_ranks_train_on_the_responses_of_two_engines(
    tmp_path: Path, way: str
) -> None:
    flags = (*BF16, *TWO_RANKS_TWO_ENGINES, "--weight-sync", way)
    lines = train(tmp_path / "run", *flags, on_gpus=True)
    check_steps(lines, BF16_MISMATCH)
    assert {line["weight_sync"] for line in lines} == {way}


@pytest.mark.parametrize("way", ["ipc", "object-store"])
def test_engines_that_share_the_gpus_of_the_ranks_take_turns_with_them(
    tmp_path: Path, way: str
) -> None:
    flags = (*BF16, *TWO_RANKS_TWO_ENGINES, "--colocate", "--weight-sync", way)
    lines = train(tmp_path / "run", *flags, on_gpus=True)
    check_steps(lines, BF16_MISMATCH)
    assert {line["weight_sync"] for line in lines} == {way}


def test_a_mixture_of_experts_trains_on_the_routes_of_its_engine(tmp_path: Path) -> None:
    flags = ("--embedded-model", "qwen3_moe", "--expert-model-parallel-size", "2")
    flags += ("--num-gpus-per-node", "2", "--use-rollout-routing-replay", "ids")
    check_steps(train(tmp_path / "run", *BF16, *flags, on_gpus=True), BF16_MISMATCH)
