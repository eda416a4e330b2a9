"""`megatron-tis train --rollout-engine vllm_server`: a server of the job's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.tiny_models import hf_model
from tests.vllm_rollouts.small_job import check_steps, save_prompts, train
from tests.vllm_rollouts.small_model import vllm_config

pytestmark = pytest.mark.timeout(1500)


def test_a_job_starts_a_server_trains_on_its_responses_and_ends_it(tmp_path: Path) -> None:
    run, model = tmp_path / "run", tmp_path / "model"
    hf_model(vllm_config(tie_word_embeddings=True)).save_pretrained(model)
    lines = train(run, "--rollout-engine", "vllm_server", *save_prompts(model, tmp_path))
    check_steps(lines, largest_mismatch=1e-6)
    log = (run / "engine_0.log").read_text()
    assert "Application startup complete" in log
    directory = log.partition("megatron_tis_server_")[2][:8]
    commands = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
    assert len(directory) == 8 and not any(directory.encode() in text for text in commands)
