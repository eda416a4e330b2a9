"""Runs the GPU suites that fit this machine: `make test-gpu`, or `python -m tests.run_gpu --gpus 2` for one of them.

What does not fit is named with the reason and still imported, so that a broken test file is noticed without GPUs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from tests.suites import GPU_SUITES, ROOT, Suite, files_of


def available_gpus() -> int:
    """CUDA devices that torch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def plan(suites: Sequence[Suite], gpus: int) -> tuple[list[Suite], list[str]]:
    """The suites that run, and one line per file that does not."""
    runnable = [suite for suite in suites if suite.num_gpus <= gpus]
    skipped = [
        f"skipped {file.name}: {suite.name} needs {suite.num_gpus} GPUs and this machine has {gpus}"
        for suite in suites
        if suite.num_gpus > gpus
        for file in files_of(suite)
    ]
    return runnable, skipped


def run_pytest(arguments: Sequence[str]) -> int:
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gpus", type=int, help="run only the suite of this many GPUs")
    wanted = parser.parse_args(argv).gpus
    suites = [suite for suite in GPU_SUITES if wanted in (None, suite.num_gpus)]
    if not suites:
        print(f"no suite needs {wanted} GPUs; there are {', '.join(s.name for s in GPU_SUITES)}")
        return 2
    runnable, skipped = plan(suites, available_gpus())
    code = 0
    for suite in runnable:
        print(f"running {suite.name}", flush=True)
        # On GPUs the cases that are slow on two cores run as well.
        code = run_pytest(["-m", "", "-rs", *map(str, files_of(suite))]) or code
    print("\n".join(skipped), flush=True)
    if skipped:
        print("importing what was skipped", flush=True)
        code = run_pytest(["--collect-only", "-qq", "-m", "", "tests/gpu"]) or code
    # A job of continuous integration asks for one suite: a runner that cannot hold it is a failure there.
    return 3 if wanted is not None and skipped else code


if __name__ == "__main__":
    sys.exit(main())
