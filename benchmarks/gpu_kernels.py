"""Compiles every Triton kernel ahead of time for GPUs that are not here, and reads what the binaries need.

Triton's compiler and NVIDIA's assembler need no GPU. Registers limit how many programs a multiprocessor holds at a
time; spilled registers go through memory. Neither says how fast a kernel is.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: Compute capability -> GPUs
ARCHITECTURES = {80: "A100", 90: "H100", 100: "B200"}
DTYPES = ("fp32", "bf16", "fp16")
_COMPILED_BY = (".venv", ".venv-kernels", ".venv-vllm")


def variants() -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """(kernel, dtype of the logits, its constants) of everything that the plugin launches."""
    from plugin.logprobs.kernels import triton_rows as kernels

    for dtype in DTYPES:
        for entropy in (False, True):
            constants = {"ENTROPY": entropy, "BLOCK": kernels._BLOCK}
            yield kernels._forward_kernel, dtype, constants
        yield kernels._backward_kernel, dtype, {"BLOCK": kernels._BLOCK}
        yield kernels._scale_kernel, dtype, {"BLOCK": kernels._BLOCK}


def compiled(kernel: Any, dtype: str, constants: dict[str, Any], capability: int) -> Any:
    """The kernel's binary for a compute capability, as Triton's compiler returns it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from plugin.logprobs.kernels import triton_rows

    types = {"logits": f"*{dtype}", "out": f"*{dtype}", "values": f"*{dtype}"}
    types |= {"targets": "*i64", "tolerance": "fp32", "scale": "fp32"}
    types |= dict.fromkeys(["rows", "columns"], "i32")
    types |= dict.fromkeys(["row_stride", "out_stride"], "i64")
    signature = {name: types.get(name, "*fp32") for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    return triton.compile(
        ASTSource(kernel, signature, constexprs=constants),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": triton_rows._WARPS},
    )


def resources(binary: Any) -> dict[str, int]:
    """Registers per thread, bytes spilled to local memory, bytes of shared memory."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [str(tools / "cuobjdump"), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {
        "registers": found["REG"],
        "spilled": found["STACK"] + found["LOCAL"],
        "shared": binary.metadata.shared,
    }


def compile_all() -> list[dict[str, Any]]:
    """One row per kernel, variant and architecture."""
    rows = []
    for kernel, dtype, constants in variants():
        for capability in ARCHITECTURES:
            rows.append(
                {
                    "kernel": kernel.fn.__name__.strip("_").removesuffix("_kernel"),
                    "dtype": dtype,
                    "variant": "entropy" if constants.get("ENTROPY") else "plain",
                    "capability": capability,
                    **resources(compiled(kernel, dtype, constants, capability)),
                }
            )
    return rows


def measure_gpu_kernels(quick: bool) -> dict[str, Any]:
    """`compile_all` in the first environment of the checkout that has Triton."""
    for environment in _COMPILED_BY:
        python = ROOT / environment / "bin" / "python"
        if not python.exists():
            continue
        command = [str(python), "-m", "benchmarks.gpu_kernels"]
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        if result.returncode == 0:
            return json.loads(result.stdout)
    return {"rows": [], "triton": None}


def main() -> int:
    try:
        import triton
    except ImportError:
        return 1
    print(json.dumps({"rows": compile_all(), "triton": triton.__version__}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
