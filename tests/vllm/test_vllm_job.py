"""`megatron-tis train --rollout-engine vllm`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.small_job import check_steps, train

pytestmark = pytest.mark.timeout(1500)


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe"])
def test_a_job_trains_on_vllms_responses(tmp_path: Path, model: str) -> None:
    check_steps(train(tmp_path / "run", "--rollout-engine", "vllm", "--embedded-model", model))


def test_low_precision_in_the_engine_shows_as_mismatch(tmp_path: Path) -> None:
    flags = ("--rollout-engine", "vllm", "--rollout-dtype", "bfloat16")
    lines = train(tmp_path / "run", *flags)
    assert all(line["mismatch_kl"] > 1e-7 for line in lines)
