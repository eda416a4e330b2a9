"""A few steps of `megatron-tis train`, and what they must show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

STEPS = 3


def save_policy(directory: Path) -> tuple[Path, Path]:
    """A tiny model directory with its tokenizer, and prompts for it."""
    from plugin.rollout.character_tokenizer import CharacterTokenizer
    from plugin.rollout.copy_digits_task import ALPHABET
    from tests.parallel.tiny_models import hf_model, tiny_qwen3
    from tests.ray.tokenizer_files import save_character_tokenizer

    size = CharacterTokenizer(ALPHABET).vocab_size
    config = tiny_qwen3(vocab_size=size, head_dim=32, num_hidden_layers=2)
    hf_model(config).save_pretrained(directory / "model")
    save_character_tokenizer(directory / "model")
    rows = [{"prompt": f"{i}{i}=", "answer": f"{i}"} for i in range(10)]
    (directory / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return directory / "model", directory / "prompts.jsonl"


def train(run_dir: Path, *flags: str) -> list[dict[str, Any]]:
    """The metrics of each step."""
    sizes = {
        "num-rollouts": STEPS,
        "rollout-batch-size": 4,
        "n-samples-per-prompt": 4,
        "max-response-length": 6,
        "lr": 1e-3,
        "start-timeout": 900,
        "step-timeout": 600,
    }
    command = [sys.executable, "-m", "plugin", "train", "--run-dir", str(run_dir)]
    command += [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    done = subprocess.run(
        [*command, *flags],
        capture_output=True,
        text=True,
        timeout=1200,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]


def check_steps(lines: list[dict[str, Any]]) -> None:
    """Every step trained, on fresh weights, with the small mismatch of two real implementations."""
    assert len(lines) == STEPS
    for line in lines:
        assert line["staleness"] == 0
        assert line["grad_norm"] > 0
        assert 0 < line["mismatch_kl"] < 1e-3
