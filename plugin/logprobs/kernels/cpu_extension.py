"""The two passes in C++ for logits in main memory.

`logprob_rows.cpp` is built on first use with one compiler call of about a second, and kept under
the user's cache directory for later processes. Where that is impossible `load_library` warns once
and returns None, and `row_kernels_for` takes the plain torch operations instead.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from plugin.logprobs.kernels.row_statistics import RowNormalizer, ShardStatistics

name = "cpu_extension"

#: In the order of the numbers that the kernels know them by.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SOURCE = Path(__file__).with_name("logprob_rows.cpp")
COMPILERS = ("g++", "c++", "clang++")
# No -ffast-math: NaN and infinity must keep their meaning.
FLAGS = (
    "-O3",
    "-march=native",
    "-fopenmp",
    "-std=c++17",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-shared",
    "-fPIC",
)
BUILD_SECONDS = 120


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Return the compiled kernels, built if not cached; None, with a warning, if impossible."""
    try:
        name, directory = f"logprob_rows-{_build_key()}.so", cache_directory()
        if directory is not None:
            return _with_signatures(_open_or_build(directory / name))
        # A loaded library does not need its file any more.
        with tempfile.TemporaryDirectory(prefix="megatron-tis-") as temporary:
            return _with_signatures(_open_or_build(Path(temporary) / name))
    except (OSError, subprocess.SubprocessError) as error:
        details = getattr(error, "stderr", None) or error
        warnings.warn(
            "log-probs run on plain torch operations, several times slower: the C++ kernels could "
            f"not be built or loaded ({details}). Install a C++17 compiler with OpenMP "
            f"({', '.join(COMPILERS)}) to speed them up.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def runs(dtype: torch.dtype) -> bool:
    """Whether the kernels could be built and know these logits; older compilers lack float16."""
    if dtype not in DTYPES or (library := load_library()) is None:
        return False
    return dtype != torch.float16 or bool(library.megatron_tis_has_float16())


def _open_or_build(path: Path) -> ctypes.CDLL:
    if path.exists():
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            path.unlink()  # damaged: build it again
    build_library(path)
    return ctypes.CDLL(str(path))


def cache_directory() -> Path | None:
    """Return where compiled kernels are kept in the user's cache; None if it is not writable."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = root / "megatron-tis"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return None
    return directory if os.access(directory, os.W_OK) else None


def build_library(path: Path) -> None:
    """Compile `logprob_rows.cpp` into `path`, in one step for ranks that build at the same time."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise FileNotFoundError(f"none of {', '.join(COMPILERS)} is on the PATH")
    handle, unfinished = tempfile.mkstemp(dir=path.parent, suffix=".so.tmp")
    os.close(handle)
    try:
        subprocess.run(
            [compiler, *FLAGS, "-o", unfinished, str(SOURCE)],
            check=True,
            capture_output=True,
            text=True,
            timeout=BUILD_SECONDS,
        )
        os.replace(unfinished, path)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def forward_blocks(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    scale: float,
    with_entropy: bool,
) -> ShardStatistics:
    """Summarize `[T, V/tp]` logits row by row; see `RowKernels`."""
    rows, columns = logits.shape
    sums = logits.new_empty((4, rows), dtype=torch.float32)
    targets = targets.contiguous()
    _library().megatron_tis_forward(
        logits.data_ptr(),
        DTYPES.index(logits.dtype),
        rows,
        columns,
        logits.stride(0),
        targets.data_ptr(),
        scale,
        int(with_entropy),
        *(sums[i].data_ptr() for i in range(4)),
        torch.get_num_threads(),
    )
    return ShardStatistics(sums[0], sums[1], sums[2] if with_entropy else None, sums[3])


def backward_blocks(
    logits: torch.Tensor,
    targets: torch.Tensor,
    rows: RowNormalizer,
    grad_log_probs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    *,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Write the gradient of `[T, V/tp]` logits into `out`; see `RowKernels`."""
    library = _library()
    if out.data_ptr() != logits.data_ptr():
        library.megatron_tis_prefer_large_pages(out.data_ptr(), out.numel() * out.element_size())
    targets = targets.contiguous()
    row_values = [
        None if value is None else value.to(torch.float32).contiguous()
        for value in (rows.maximum, rows.sum_exp, rows.entropy, grad_log_probs, grad_entropy)
    ]
    library.megatron_tis_backward(
        logits.data_ptr(),
        DTYPES.index(logits.dtype),
        logits.shape[0],
        logits.shape[1],
        logits.stride(0),
        targets.data_ptr(),
        *(None if value is None else value.data_ptr() for value in row_values),
        scale,
        out.data_ptr(),
        out.stride(0),
        torch.get_num_threads(),
    )


def _library() -> ctypes.CDLL:
    library = load_library()
    assert library is not None, "row_kernels_for offers these kernels only after they loaded"
    return library


def _build_key() -> str:
    """Changes with the source, the flags and the processor, which `-march=native` compiles for."""
    digest = hashlib.sha256(SOURCE.read_bytes())
    digest.update(" ".join((*FLAGS, platform.system(), platform.machine())).encode())
    digest.update(_processor_features().encode())
    return digest.hexdigest()[:16]


def _processor_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _with_signatures(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, size, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
    shape: list[Any] = [pointer, number, size, size, size, pointer]
    library.megatron_tis_forward.argtypes = [*shape, real, number, *[pointer] * 4, number]
    library.megatron_tis_backward.argtypes = [*shape, *[pointer] * 5, real, pointer, size, number]
    library.megatron_tis_prefer_large_pages.argtypes = [pointer, size]
    for function in ("forward", "backward", "prefer_large_pages"):
        getattr(library, f"megatron_tis_{function}").restype = None
    return library
