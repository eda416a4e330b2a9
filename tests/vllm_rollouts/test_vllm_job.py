"""`megatron-tis train --rollout-engine vllm`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm_rollouts.small_job import check_steps, train

pytestmark = pytest.mark.timeout(1500)


@pytest.mark.parametrize(
    ("model", "dtype", "low", "high"),
    [("qwen3_moe", "float32", 0.0, 1e-6), ("qwen3", "bfloat16", 1e-8, 1e-2)],
)
def test_a_job_trains_on_vllms_responses(
    tmp_path: Path, model: str, dtype: str, low: float, high: float
) -> None:
    flags = ("--rollout-engine", "vllm", "--embedded-model", model, "--rollout-dtype", dtype)
    lines = train(tmp_path / "run", *flags)
    check_steps(lines)
    assert all(low < line["mismatch_kl"] < high for line in lines)
