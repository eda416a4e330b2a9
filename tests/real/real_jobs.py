"""`megatron-tis train` on the real model, as a user runs it: a process of its own with the interpreter of an environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.suites import ROOT

#: Examples in the conversation make the model answer in the same form: 7 of 8 sums of small numbers are then right at temperature
#: 1. Sums of larger numbers are mostly wrong, so that a rollout has rewards of both kinds.
EXAMPLES = (("What is 1 + 1?", "1 + 1 = 2"), ("What is 2 + 3?", "2 + 3 = 5"))
SUMS = ((3, 4), (2, 2), (48, 37), (59, 26))

SIZES = {
    "rollout-batch-size": len(SUMS),
    "n-samples-per-prompt": 2,
    "max-response-length": 12,
    # vLLM reserves its cache by these two.
    "max-prompt-length": 128,
    "rollout-max-batch": 2 * len(SUMS),
    "max-tokens-per-gpu": 400,
    # Advantages over the whole batch: small and large sums differ, whatever a group of two does.
    "advantage-estimator": "reinforce_plus_plus",
    "reward": "numeric",
    "reward-workers": 1,
    "start-timeout": 600,
    "step-timeout": 600,
}


def vllm_python() -> str:
    """The interpreter of the environment with vLLM."""
    python = ROOT / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        pytest.fail(f"{python} is not there; `make .venv-vllm/ready` builds it", pytrace=False)
    return str(python)


def save_rows(directory: Path) -> Path:
    """Prompts as chats: two answered questions, then the one to answer."""
    shown = [
        {"role": role, "content": text}
        for example in EXAMPLES
        for role, text in zip(("user", "assistant"), example, strict=True)
    ]
    system = {"role": "system", "content": "Answer with the sum."}
    rows = [
        {
            "prompt": [system, *shown, {"role": "user", "content": f"What is {a} + {b}?"}],
            "answer": str(a + b),
        }
        for a, b in SUMS
    ]
    file = directory / "sums.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def train(
    run_dir: Path, model: str, settings: dict[str, Any], *, python: str = sys.executable
) -> list[dict[str, Any]]:
    """The metrics of every update in the run directory."""
    rows = save_rows(run_dir.parent)
    flags = {"hf-checkpoint": model, "prompt-data": rows, "run-dir": run_dir, **SIZES, **settings}
    command = [python, "-m", "plugin", "train", "--apply-chat-template"]
    for name, value in flags.items():
        switches = {True: [f"--{name}"], False: [f"--no-{name}"]}
        command += switches[value] if isinstance(value, bool) else [f"--{name}", str(value)]
    environment = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    with (run_dir.parent / f"{run_dir.name}.log").open("a+") as log:
        process = subprocess.Popen(
            command,
            cwd=run_dir.parent,
            env=os.environ | environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait()
        finally:
            # A test that ran out of time leaves nothing behind.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        assert code == 0, log.read()[-6000:]
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
