"""The reward `code_tests`: a response's program has to pass the tests of its row.

A label is Python text with assertions, a list of such texts, or what a program reads and has to
print: {"inputs": ["2 3\\n"], "outputs": ["5\\n"]}. Lists may be JSON text. The reward is 1 if all
tests pass. Tests and program run in different processes (`sandbox.py`), and what a program returns
or prints is compared where the program cannot reach.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

from plugin.errors import EngineError
from plugin.rewards import sandbox

_FENCE = re.compile(r"```[ \t]*+([\w+-]*+)[ \t]*+\r?\n(.*?)```", re.DOTALL)
_SECONDS = 10.0
_PROBE_SECONDS = 30.0
_MEMORY_MB = 1024
_OUTPUT_BYTES = 1 << 20
# One thread per library: on a machine with many cores they would be too many processes.
_ENVIRONMENT = {"PATH": os.defpath, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def code_tests(
    response: str,
    row: Mapping[str, Any],
    *,
    label: Any,
    timeout: float,
    isolation: str | None = None,
) -> float:
    """1 if the last Python block of the response, or all of it, passes every test of the label.

    All tests together have 10 seconds, or 80 % of --reward-timeout if that is less. isolation: one
    of `sandbox.ISOLATION`; None = the strongest that works here.
    """
    block = code_block(response, ("python", "py", "python3", ""))
    program = response if block is None else block
    if not program.strip():
        return 0.0
    isolation = isolation or strongest_isolation()
    deadline = time.monotonic() + min(_SECONDS, 0.8 * timeout)
    tests = _tests(label)
    if isinstance(tests, str):
        return float(_run({"program": program, "tests": tests}, isolation, deadline) is not None)
    for given, wanted in tests:
        printed = _run({"program": program, "stdin": given}, isolation, deadline)
        if printed is None or printed.split() != wanted.split():
            return 0.0
    return 1.0


def code_block(text: str, languages: tuple[str, ...]) -> str | None:
    """The last fenced block in one of `languages`; '' is a block without a name."""
    found = [code for language, code in _FENCE.findall(text) if language.lower() in languages]
    return found[-1] if found else None


def _run(job: dict[str, str], isolation: str, deadline: float) -> str | None:
    """What a program prints; None if it, or one of its tests, fails or exceeds its limits."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        return None
    with (
        _directory(isolation) as directory,
        os.fdopen(os.memfd_create("printed"), "w+b") as printed,
    ):
        process = subprocess.Popen(
            [
                *(sys.executable, "-I", sandbox.__file__, isolation),
                *(str(_MEMORY_MB), str(seconds), directory),
            ],
            env=_ENVIRONMENT,  # nothing of the job's, where keys may be
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            # It keeps the time itself; this is for one that is stopped from outside.
            process.communicate(json.dumps(job).encode(), timeout=seconds + 5)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode == sandbox.NOT_ISOLATED:
            raise EngineError(f"code_tests: the isolation {isolation!r} could not be set up")
        printed.seek(0)
        text = printed.read(_OUTPUT_BYTES).decode(errors="replace")
        return text if process.returncode == sandbox.PASSED else None


@contextlib.contextmanager
def _directory(isolation: str) -> Iterator[str]:
    """The program's directory; in namespaces it is in memory and ends with them."""
    if isolation == "namespaces":
        yield "/tmp"
        return
    path = tempfile.mkdtemp(prefix=directory_prefix(os.getpid()))
    try:
        os.chmod(path, 0o777)
        yield path
    finally:
        sandbox.remove_directory(path)


def directory_prefix(process: int) -> str:
    """How the directories of programs are called that a process runs."""
    return f"megatron_tis_code_{process}_"


@functools.cache
def strongest_isolation() -> str:
    """What this machine lets `sandbox.py` keep programs in."""
    probe = {"program": "import colorsys", "tests": "import colorsys"}
    for isolation in sandbox.ISOLATION[:-1]:
        with contextlib.suppress(EngineError, OSError):
            if _run(probe, isolation, time.monotonic() + _PROBE_SECONDS) is not None:
                return isolation
    return sandbox.ISOLATION[-1]


def tests_problem(label: Any) -> str | None:
    """Why a label holds no tests."""
    try:
        tests = _tests(label)
    except (TypeError, ValueError, RecursionError) as error:
        return str(error)
    if not tests:
        return "it holds no test"
    if isinstance(tests, str):
        try:
            compile(tests, "tests", "exec")
        except (SyntaxError, ValueError) as error:
            return f"its tests are not Python ({error})"
    return None


def _tests(label: Any) -> str | list[tuple[str, str]]:
    """Python text of assertions, or pairs of what a program reads and has to print."""
    if isinstance(label, str):
        if label.lstrip()[:1] not in ("[", "{"):
            return label.strip()
        label = json.loads(label)
    if isinstance(label, list) and all(isinstance(test, str) for test in label):
        return "\n".join(label)
    if isinstance(label, Mapping):
        given, wanted = label.get("inputs"), label.get("outputs")
        pair = (given, wanted)
        if all(isinstance(p, list) and all(isinstance(t, str) for t in p) for p in pair):
            assert isinstance(given, list) and isinstance(wanted, list)
            if len(given) == len(wanted):
                return list(zip(given, wanted, strict=True))
    raise TypeError(
        f"it is {str(label)[:80]!r}, of type {type(label).__name__}; it must be Python text with "
        'assertions, a list of such texts, or {"inputs": [...], "outputs": [...]} of equal length'
    )
