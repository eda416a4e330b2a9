"""A few steps of `megatron-tis train`, and what they must show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

STEPS = 3


def save_prompts(model: Path, directory: Path) -> list[str]:
    """Gives a model directory a tokenizer; flags of a job on prompts whose responses earn a share of digits."""
    from tests.ray.tokenizer_files import save_character_tokenizer

    save_character_tokenizer(model)
    rows = [{"prompt": f"{i}{i}=", "answer": f"{i}"} for i in range(10)]
    (directory / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (directory / "reward.py").write_text(
        "def digits(response, row):\n    return sum(map(str.isdigit, response)) / 6\n"
    )
    return [
        *("--hf-checkpoint", str(model), "--prompt-data", str(directory / "prompts.jsonl")),
        *("--reward-function-path", f"{directory / 'reward.py'}:digits"),
    ]


def train(run_dir: Path, *flags: str, on_gpus: bool = False) -> list[dict[str, Any]]:
    """The metrics of each step; without `on_gpus` the job sees no GPU."""
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
        env=os.environ | ({} if on_gpus else {"CUDA_VISIBLE_DEVICES": ""}),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]


def check_steps(lines: list[dict[str, Any]], largest_mismatch: float = 1e-3) -> None:
    """Every step trained, on fresh weights, with the small mismatch of two real implementations."""
    assert len(lines) == STEPS
    for line in lines:
        assert line["staleness"] == 0
        assert line["grad_norm"] > 0
        assert 0 < line["mismatch_kl"] < largest_mismatch
