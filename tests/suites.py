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
    Suite("slow", "make test-slow", 60),
    Suite("adapters", "make test-adapters", 30),
    Suite("kernels", "make test-kernels", 20),
    Suite("real", "make test-real", 60),
    Suite("docs", "make docs", 15),
)

GPU_COUNTS = (1, 2, 4)
GPU_SUITES = tuple(
    Suite(f"gpu-{count}", f".venv-gpu/bin/python -m tests.run_gpu --gpus {count}", 90, count)
    for count in GPU_COUNTS
)


@dataclass(frozen=True)
class GpuPins:
    """What a GPU environment is made of; requirement files, Makefile, workflow, extra and docs follow it.

    transformer_engine, accepted: the version that is installed, and those that Megatron-Core's metadata names
    flash_attn: within the bounds of that Transformer Engine (`FlashAttentionUtils`)
    """

    megatron_core: str
    python: str
    torch: str
    transformer_engine: str
    accepted: str
    flash_attn: str
    requirements: str
    target: str


GPU_PINS = (
    GpuPins(
        megatron_core="0.16.1",
        python="3.12",
        torch="2.13.0",
        transformer_engine="2.11.0",
        accepted=">=2.9,<2.12",
        flash_attn="2.8.3",
        requirements="requirements/gpu.txt",
        target="venv-gpu",
    ),
    GpuPins(
        megatron_core="0.19.2",
        python="3.12",
        torch="2.14.1",
        transformer_engine="2.20.2",
        accepted="",
        flash_attn="2.8.3",
        requirements="requirements/gpu-mcore-latest.txt",
        target="venv-gpu-mcore-latest",
    ),
)

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
