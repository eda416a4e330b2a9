"""Counts the lines of `plugin/` that only a GPU runs: `python -m tests.gpu_only_lines`.

`GPU_ONLY` names each part, what checks it without a GPU, and what remains unproven; docs/testing.md shows the same table.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "plugin"


@dataclass(frozen=True)
class GpuOnly:
    """Lines that only run on CUDA.

    names: functions of the file, all of it if empty; a function counts whole, also where only a branch of it needs CUDA
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
        ("row_kernels_for", "_triton_rows"),
        "the choice of other devices on the pretend device; the import in `make test-kernels`",
        "nothing else",
    ),
    GpuOnly(
        "logprobs/separable_lm_head.py",
        ("_rescale",),
        "the branch of other devices on the pretend device, the kernel in the interpreter",
        "the branch itself",
    ),
    GpuOnly(
        "logprobs/fused_lm_head.py",
        ("budget_bytes",),
        "the pretend device takes CUDA's budget",
        "the best size",
    ),
    GpuOnly(
        "logprobs/lm_head_tiles.py",
        ("__init__",),
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
        ("capabilities", "transformer_settings", "set_cuda_environment", "warn_of_local_layers"),
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
        ("build_model", "_build_chunk", "_check_router_fusion"),
        "everything but the move to the device, on gloo ranks",
        "Transformer Engine's layers, the fused router",
    ),
    GpuOnly(
        "megatron_backend/model/hf_weights.py",
        ("_whole",),
        "gathered over gloo",
        "over NCCL",
    ),
    GpuOnly(
        "megatron_backend/parallel_groups.py",
        ("init_parallel",),
        "on gloo ranks",
        "the device of a rank, NCCL",
    ),
    GpuOnly(
        "megatron_backend/trainer.py",
        ("__init__",),
        "both passes of a real model on the pretend device",
        "the optimizer on CUDA",
    ),
    GpuOnly(
        "megatron_backend/checkpoint/rng_state.py",
        ("rng_state", "set_rng_state"),
        "the generators of the CPU",
        "that of CUDA",
    ),
    GpuOnly(
        "host_storage.py",
        ("_storages", "_copy", "park"),
        "with tensors of the CPU",
        "pinned memory, what the device gets back",
    ),
    GpuOnly(
        "launch/preflight.py",
        ("check_job",),
        "with numbers of GPUs given",
        "nothing else",
    ),
    GpuOnly("launch/remote_calls.py", ("use_threads",), "on CPU", "nothing else"),
    GpuOnly(
        "plan/counted_group.py",
        ("fake_world",),
        "on the meta device; it runs without GPUs by design",
        "nothing else",
    ),
    GpuOnly(
        "rollout/engines/vllm_engine.py",
        ("_build", "parallel_options", "__init__", "_replace_weights"),
        "vLLM on CPU (`make test-vllm`)",
        "vLLM on CUDA: memory, sleep, NCCL",
    ),
    GpuOnly(
        "rollout/engines/weight_stream.py",
        ("_connect", "close", "_room_for"),
        "over gloo",
        "over NCCL",
    ),
    GpuOnly(
        "rollout/engines/served_engine.py",
        ("__init__",),
        "with a server on CPU",
        "its devices",
    ),
    GpuOnly(
        "rollout/engines/transformers_engine.py",
        ("__init__",),
        "on CPU",
        "on CUDA",
    ),
    GpuOnly(
        "doctor/environment_checks.py",
        ("_devices", "_transformer_engine", "_process_groups"),
        "the answers without GPUs",
        "those with",
    ),
    GpuOnly("doctor/layout_agreement.py", ("default_layouts",), "without GPUs", "with"),
)


def all_lines() -> int:
    """Lines of Python in the package."""
    return sum(len(file.read_text().splitlines()) for file in PLUGIN.rglob("*.py"))


def lines_of(part: GpuOnly) -> list[tuple[int, int]]:
    """First and last line of every function of a part, or of the file."""
    text = (PLUGIN / part.file).read_text()
    if not part.names:
        return [(1, len(text.splitlines()))]
    found = {
        node.name: (
            min([node.lineno, *(d.lineno for d in node.decorator_list)]),
            node.end_lineno or 0,
        )
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
    }
    return [found[name] for name in part.names]


def mentions_cuda(node: ast.AST) -> bool:
    """Whether code asks for CUDA: `torch.cuda` or the device's name."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr == "cuda":
            if isinstance(part.value, ast.Name) and part.value.id == "torch":
                return True
        elif isinstance(part, ast.Constant) and part.value == "cuda":
            return True
    return False


def asking_for_cuda() -> list[tuple[str, str]]:
    """(file, function) of every function that asks for CUDA; the CPU runtime, which takes its place, aside."""
    found = []
    for file in sorted(PLUGIN.rglob("*.py")):
        name = str(file.relative_to(PLUGIN))
        if name in ("megatron_backend/cpu_runtime.py", "logprobs/kernels/triton_rows.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and mentions_cuda(node):
                found.append((name, node.name))
    return found


def count() -> int:
    """GPU-only lines."""
    return sum(last - first + 1 for part in GPU_ONLY for first, last in lines_of(part))


def table() -> str:
    """The table of docs/testing.md."""
    rows = ["| GPU-only | what checks it here | what remains unproven |", "|---|---|---|"]
    for part in GPU_ONLY:
        names = ", ".join(f"`{name}`" for name in part.names) or "all of it"
        rows.append(f"| `{part.file}`: {names} | {part.checked_by} | {part.unproven} |")
    return "\n".join(rows)


if __name__ == "__main__":
    for part in GPU_ONLY:
        spans = ", ".join(f"{first}-{last}" for first, last in lines_of(part))
        print(f"{part.file}: {spans}")
    print(f"{count()} of {all_lines()} lines, {100 * count() / all_lines():.1f} %")
