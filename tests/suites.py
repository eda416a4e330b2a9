"""Which suites there are, what they run and how many GPUs each needs. Workflows and `make test-gpu` follow it.

A file in tests/gpu says with `NUM_GPUS` how many GPUs it needs and so belongs to the suite of that number.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
GPU_DIRECTORY = ROOT / "tests" / "gpu"


@dataclass(frozen=True)
class Suite:
    """One job of continuous integration.

    command: what the job runs, in a shell at the root of the repository
    """

    name: str
    command: str
    minutes: int
    num_gpus: int = 0


CPU_SUITES = (
    Suite("lint", "make lint", 15),
    Suite("unit", ".venv/bin/python -m pytest tests/unit", 30),
    Suite("parallel", ".venv/bin/python -m pytest tests/parallel", 60),
    Suite("ray", ".venv/bin/python -m pytest tests/ray", 45),
    Suite("docs", "make docs", 15),
)

#: `make test-all` runs them too, except the audit.
NIGHTLY_SUITES = (
    Suite("slow", "make test-slow", 120),
    Suite("families", "make test-families", 90),
    Suite("vllm", "make test-vllm", 60),
    Suite("adapters", "make test-adapters", 30),
    Suite("kernels", "make test-kernels", 20),
    Suite("te", "make test-te", 20),
    Suite("skyrl", "make test-skyrl", 45),
    Suite("mcore-latest", "make test-mcore-latest", 90),
    Suite("real", "make test-real", 60),
    Suite("environments", "make test-environments", 15),
    Suite("audit", "make audit", 15),
)

GPU_COUNTS = (1, 2, 4)
GPU_SUITES = tuple(
    Suite(f"gpu-{count}", f".venv-gpu/bin/python -m tests.run_gpu --gpus {count}", 90, count)
    for count in GPU_COUNTS
)


#: The Python of the GPU environments.
GPU_PYTHON = "3.12"
#: The container of the GPU jobs: a CUDA toolkit, with which `make venv-gpu` builds Transformer Engine and flash-attn.
GPU_IMAGE = "nvcr.io/nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04"


def gpu_files() -> list[Path]:
    """Test files of the GPU suites."""
    return sorted(GPU_DIRECTORY.glob("test_*.py"))


def declared_gpus(file: Path) -> int | None:
    """The `NUM_GPUS` of a test file, read without importing it; None if it declares none."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if "NUM_GPUS" in names and isinstance(node.value.value, int):
                return node.value.value
    return None


def files_of(suite: Suite) -> list[Path]:
    """The files that a GPU suite runs."""
    return [file for file in gpu_files() if declared_gpus(file) == suite.num_gpus]
