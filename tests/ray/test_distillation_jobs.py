"""Jobs in which a teacher alone says what is learned: no label, no reward, no group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from plugin.cluster.model_source import policy_source
from plugin.config import JobConfig
from plugin.controller.job import run_job
from tests.ray.tokenizer_files import save_character_tokenizer
from tests.unit.teachers.stand_in_teacher import StandInTeacher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

JOB: dict[str, Any] = {
    "num_nodes": 1,
    "num_rollouts": 15,
    "rollout_batch_size": 32,
    "n_samples_per_prompt": 1,
    "max_prompt_length": 8,
    "max_response_length": 6,
    "micro_batch_size": 32,
    "lr": 3e-3,
    "advantage_estimator": "none",
    "policy_loss": "reinforce",
    "calculate_per_token_loss": True,
    "start_timeout": 250.0,
    "step_timeout": 240.0,
}


def saved_model(directory: Path, seed: int, sharpness: float) -> str:
    """A tiny model with random weights; its logits are multiplied by `sharpness`."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = policy_source(JobConfig.from_sources({})).as_config()
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.lm_head.weight *= sharpness
    model.save_pretrained(directory)
    save_character_tokenizer(directory)
    return str(directory)


def rows(path: Path) -> str:
    lines = [
        {"prompt": f"{i}{i}=", "domain": ("own", "served")[i % 2]} for i in range(10) for _ in "ab"
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_a_teacher_in_the_job_alone_teaches_its_distribution(
    two_nodes: str, tmp_path: Path
) -> None:
    config = JobConfig.from_sources(
        {
            **JOB,
            "address": two_nodes,
            "run_dir": str(tmp_path / "run"),
            "hf_checkpoint": saved_model(tmp_path / "student", 1, 1.0),
            "prompt_data": rows(tmp_path / "rows.jsonl"),
            "teacher_hf_checkpoint": saved_model(tmp_path / "teacher", 2, 4.0),
            "distill_topk": 5,
            "num_gpus_per_node": 2,
            "tensor_model_parallel_size": 2,
            "reference_offload": True,
        }
    )
    history = run_job(config).history
    kl = [line["distill_kl"] for line in history]
    # the reverse KL over 5 ids and a rest, of the states that the student reaches itself
    assert kl[0] > 0.1 and kl[-1] < 0.5 * kl[0], kl
    assert all(line["reward"] == 0.0 for line in history)
    assert abs(history[-1]["teacher_kl"]) < abs(history[0]["teacher_kl"])


def test_two_teachers_by_column_one_of_them_behind_http(two_nodes: str, tmp_path: Path) -> None:
    server = StandInTeacher("vllm", seed=3, vocab=15)
    try:
        config = JobConfig.from_sources(
            {
                **JOB,
                "address": two_nodes,
                "run_dir": str(tmp_path / "run"),
                "hf_checkpoint": saved_model(tmp_path / "student", 1, 1.0),
                "prompt_data": rows(tmp_path / "rows.jsonl"),
                "teachers": [f"own={saved_model(tmp_path / 'teacher', 2, 4.0)}", f"served={server.url}"],
                "teacher_key": "domain",
                "teacher_tau": 1.0,
                "policy_loss": "ppo",
                "n_samples_per_prompt": 4,
                "global_batch_size": 64,
            }
        )  # fmt: skip
        history = run_job(config).history
    finally:
        server.close()
    # the probe before the start, and half of 128 samples of every rollout
    assert len(server.asked) == pytest.approx(1 + 15 * 64, abs=15 * 16)
    assert len({len(body["prompt"]) for body in server.asked}) > 1
    kl = [line["teacher_kl"] for line in history]
    assert sum(kl[-4:]) < 0.6 * sum(kl[:4]), kl
