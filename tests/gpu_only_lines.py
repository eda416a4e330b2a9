"""Counts the lines of `plugin/` that only a GPU runs: `python -m tests.gpu_only_lines`.

`GPU_ONLY` names each part, what checks it without a GPU, and what remains unproven; docs/testing.md shows the same table.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "plugin"
KERNELS = "logprobs/kernels/triton_rows.py"


@dataclass(frozen=True)
class GpuOnly:
    """Lines that only run on CUDA.

    names: functions besides those that ask for CUDA; a function counts whole, also where only a branch of it needs CUDA
    """

    file: str
    names: tuple[str, ...]
    checked_by: str
    unproven: str


GPU_ONLY = (
    GpuOnly(
        "logprobs/kernels/triton_rows.py",
        (),
        "compiled to sm_80, sm_90, sm_100 without spills; results in Triton's interpreter (`make test-kernels`)",
        "speed; numerics of the device's exp and log",
    ),
    GpuOnly(
        "logprobs/kernels/__init__.py",
        ("_triton_rows",),
        "the choice of other devices on the pretend device; the import in `make test-kernels`",
        "nothing else",
    ),
    GpuOnly(
        "logprobs/separable_lm_head.py",
        (),
        "the branch of other devices on the pretend device, the kernel in the interpreter",
        "the branch itself",
    ),
    GpuOnly(
        "logprobs/fused_lm_head.py",
        (),
        "the pretend device takes CUDA's budget",
        "the best size",
    ),
    GpuOnly(
        "logprobs/lm_head_tiles.py",
        (),
        "the pretend device takes CUDA's tiles",
        "the best size",
    ),
    GpuOnly(
        "megatron_backend/step/sequence_packing.py",
        ("thd_params",),
        "values by hand on CPU",
        "Transformer Engine's attention with them",
    ),
    GpuOnly(
        "megatron_backend/model/device_settings.py",
        ("transformer_settings", "set_cuda_environment", "warn_of_local_layers"),
        "as functions of configuration and capabilities; fused gradients and overlap on gloo ranks",
        "that the fused kernels accept every model family",
    ),
    GpuOnly(
        "config/device_defaults.py",
        ("cuda_environment",),
        "by hand",
        "its effect on memory and overlap",
    ),
    GpuOnly(
        "megatron_backend/model/builder.py",
        (),
        "everything but the move to the device, on gloo ranks; weights, checkpoints and replay over modules with Transformer Engine's names",
        "Transformer Engine's layers, the fused router",
    ),
    GpuOnly(
        "megatron_backend/model/gathered_weights.py",
        (),
        "gathered over gloo",
        "over NCCL",
    ),
    GpuOnly(
        "megatron_backend/parallel_groups.py",
        (),
        "on gloo ranks",
        "the device of a rank, NCCL",
    ),
    GpuOnly(
        "megatron_backend/rank_model.py",
        (),
        "both passes of a real model on the pretend device",
        "the optimizer on CUDA",
    ),
    GpuOnly(
        "megatron_backend/checkpoint/rng_state.py",
        (),
        "the generators of the CPU",
        "that of CUDA",
    ),
    GpuOnly(
        "rollout/engines/server_commands.py",
        (),
        "servers that start on CPU (`make test-vllm`, `make test-real`)",
        "the memory share that vLLM and SGLang choose on a GPU",
    ),
    GpuOnly(
        "host_storage.py",
        (),
        "with tensors of the CPU",
        "pinned memory, what the device gets back",
    ),
    GpuOnly(
        "launch/preflight.py",
        (),
        "with numbers of GPUs given",
        "nothing else",
    ),
    GpuOnly("launch/remote_calls.py", (), "on CPU", "nothing else"),
    GpuOnly(
        "plan/counted_group.py",
        (),
        "on the meta device; it runs without GPUs by design",
        "nothing else",
    ),
    GpuOnly(
        "rollout/engines/vllm_engine.py",
        (),
        "vLLM on CPU (`make test-vllm`)",
        "vLLM on CUDA: memory, sleep",
    ),
    GpuOnly(
        "rollout/engines/vllm_startup.py",
        (),
        "vLLM on CPU (`make test-vllm`)",
        "what vLLM is started with on CUDA",
    ),
    GpuOnly(
        "rollout/engines/vllm_weights.py",
        (),
        "vLLM on CPU (`make test-vllm`)",
        "NCCL, CUDA memory",
    ),
    GpuOnly(
        "rollout/engines/weight_stream.py",
        (),
        "over gloo",
        "over NCCL",
    ),
    GpuOnly(
        "rollout/engines/lent_memory.py",
        (),
        "with memory of the host: order, deaths, nothing left behind",
        "CUDA IPC",
    ),
    GpuOnly(
        "rollout/engines/weight_handover.py",
        (),
        "with memory of the host",
        "that copies on the GPU are waited for",
    ),
    GpuOnly(
        "rollout/engines/served_engine.py",
        (),
        "with a server on CPU",
        "its devices",
    ),
    GpuOnly(
        "rollout/engines/transformers_engine.py",
        (),
        "on CPU",
        "on CUDA",
    ),
    GpuOnly(
        "doctor/environment_checks.py",
        (),
        "the answers without GPUs",
        "those with",
    ),
    GpuOnly("doctor/layout_agreement.py", (), "without GPUs", "with"),
)


def all_lines() -> int:
    """Lines of Python in the package."""
    return sum(len(file.read_text().splitlines()) for file in PLUGIN.rglob("*.py"))


def lines_of(part: GpuOnly) -> list[tuple[int, int]]:
    """First and last line of every function of a part; of a kernel file, all of it."""
    text = (PLUGIN / part.file).read_text()
    if part.file == KERNELS:
        return [(1, len(text.splitlines()))]
    found = {
        (node.lineno, node.end_lineno or 0)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and (node.name in part.names or mentions_cuda(node))
    }
    outer = {(f, t) for f, t in found if any(a < f and t <= b for a, b in found)}
    return sorted(found - outer)


def mentions_cuda(node: ast.AST) -> bool:
    """Whether code asks for CUDA: `torch.cuda` or the device's name."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr == "cuda":
            if isinstance(part.value, ast.Name) and part.value.id == "torch":
                return True
        elif isinstance(part, ast.Constant) and part.value == "cuda":
            return True
    return False


def files_asking_for_cuda() -> list[str]:
    """Files with a function that asks for CUDA; the CPU runtime, which takes its place, aside."""
    found = []
    for file in sorted(PLUGIN.rglob("*.py")):
        name = str(file.relative_to(PLUGIN))
        functions = (
            n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef)
        )
        if name != "megatron_backend/cpu_runtime.py" and any(map(mentions_cuda, functions)):
            found.append(name)
    return found


def count() -> int:
    """GPU-only lines."""
    return sum(last - first + 1 for part in GPU_ONLY for first, last in lines_of(part))


def table() -> str:
    """The table of docs/testing.md."""
    rows = ["| GPU-only | what checks it here | what remains unproven |", "|---|---|---|"]
    for part in GPU_ONLY:
        rows.append(f"| `{part.file}` | {part.checked_by} | {part.unproven} |")
    return "\n".join(rows)


if __name__ == "__main__":
    for part in GPU_ONLY:
        spans = ", ".join(f"{first}-{last}" for first, last in lines_of(part))
        print(f"{part.file}: {spans}")
    print(f"{count()} of {all_lines()} lines, {100 * count() / all_lines():.1f} %")
