"""Writes requirements/gpu-vllm.txt for a torch: `python requirements/lock_gpu.py 2.13.0`.

The versions of cpu.txt stay where they fit. Nothing is installed: uv reads metadata alone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

DIRECTORY = Path(__file__).parent
HEADER = """\
# What `make venv-gpu` installs on top of a CUDA build of torch, before gpu.txt: vLLM, which asks
# for one torch exactly (0.33: not the one Transformer Engine and flash-attn are built for here),
# and what cpu.txt has for running and testing. Linux x86-64, Python 3.11 and 3.12. Written by
# `make lock-gpu`.
"""
#: That of the images the GPU suites run in.
PLATFORM = "x86_64-manylinux_2_39"
#: What archives need that are built on the spot and do not say it: read from their setup.py.
BUILT_HERE = """
[[dependency-metadata]]
name = "flash-attn"
requires-dist = ["torch", "einops"]

[[dependency-metadata]]
name = "transformer-engine-torch"
version = "2.11.0"
requires-dist = [
    "torch>=2.1", "einops", "onnxscript", "onnx", "packaging", "pydantic",
    "transformer_engine_cu13==2.11.0",
]
"""


def pins_of(file: Path) -> list[str]:
    """The lines of a requirements file, without hashes and comments."""
    lines = (line.split("#")[0].strip("\\ \n") for line in file.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("--hash")]


def resolve(wanted: Sequence[str], python: str, preferred: Sequence[str] = ()) -> list[str]:
    """`name==version` of all that pip would install; exits with uv's reason if nothing fits.

    preferred: versions that are kept where they fit
    """
    with tempfile.TemporaryDirectory() as directory:
        given, settings, output = (Path(directory, name) for name in ("in", "uv.toml", "out"))
        given.write_text("\n".join(wanted))
        settings.write_text(BUILT_HERE)
        output.write_text("".join(f"{pin}\n" for pin in preferred))
        uv = shutil.which("uv", path=str(Path(sys.executable).parent))
        if uv is None:
            raise SystemExit(
                "uv is not installed here; make test-environments and make lock-gpu have it"
            )
        flags = ("--quiet", "--no-header", "--no-annotate", "--python-version", python)
        files = ("--config-file", str(settings), "--output-file", str(output))
        platform = ("--python-platform", PLATFORM)
        command = [uv, "pip", "compile", str(given), *flags, *files, *platform]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        return pins_of(output)


def main() -> None:
    torch = f"torch=={sys.argv[1]}"
    wanted = [torch, *pins_of(DIRECTORY / "gpu-vllm.in")]
    found = resolve(wanted, "3.12", preferred=pins_of(DIRECTORY / "cpu.txt"))
    pins = [pin for pin in found if pin != torch]
    (DIRECTORY / "gpu-vllm.txt").write_text(HEADER + "\n".join(pins) + "\n")


if __name__ == "__main__":
    main()
