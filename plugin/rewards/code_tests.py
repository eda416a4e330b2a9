"""The reward `code_tests`: a response's program has to pass the tests of its row.

A label is Python text with assertions, a list of such texts, or what a program reads and has to
print: {"inputs": ["2 3\\n"], "outputs": ["5\\n"]}. Lists may be JSON text. The reward is 1 if all
tests pass. The limits of a program are those of `sandbox.py`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plugin.rewards import sandbox

_FENCE = re.compile(r"```[ \t]*([\w+-]*)[ \t]*\r?\n(.*?)```", re.DOTALL)
_SECONDS = 10.0
_MEMORY_MB = 1024
_OUTPUT_BYTES = 1 << 20


def code_tests(response: str, row: Mapping[str, Any], *, label: Any, timeout: float) -> float:
    """1 if the last Python block of the response, or all of it, passes every test of the label.

    All tests together have 10 seconds, or 80 % of --reward-timeout if that is less.
    """
    block = code_block(response, ("python", "py", "python3", ""))
    program = response if block is None else block
    if not program.strip():
        return 0.0
    deadline = time.monotonic() + min(_SECONDS, 0.8 * timeout)
    tests = _tests(label)
    if isinstance(tests, str):
        # Printed after the last test: a program that ends early has not passed.
        proof = secrets.token_hex(16)
        program = f"{program}\n\n{tests}\n\nprint({proof!r})\n"
        printed = run_program(program, "", deadline)
        return float(printed is not None and printed.rstrip().endswith(proof))
    for given, wanted in tests:
        printed = run_program(program, given, deadline)
        if printed is None or printed.split() != wanted.split():
            return 0.0
    return 1.0


def code_block(text: str, languages: tuple[str, ...]) -> str | None:
    """The last fenced block in one of `languages`; '' is a block without a name."""
    found = [code for language, code in _FENCE.findall(text) if language.lower() in languages]
    return found[-1] if found else None


def run_program(program: str, given: str, deadline: float) -> str | None:
    """What a program prints for the input `given`; None if it fails or exceeds its limits."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        return None
    with tempfile.TemporaryDirectory(prefix="megatron_tis_code_") as directory:
        file = Path(directory, "program.py")
        file.write_text(program, encoding="utf-8", errors="replace")
        limits = (str(_MEMORY_MB), str(int(seconds) + 1))
        with open(Path(directory, "printed"), "w+b") as printed:
            process = subprocess.Popen(
                [sys.executable, "-I", sandbox.__file__, *limits, str(file)],
                cwd=directory,
                # Nothing of the job's environment, where keys may be.
                env={"PATH": os.defpath, "HOME": directory, "TMPDIR": directory},
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                process.communicate(given.encode(errors="replace"), timeout=seconds)
            except subprocess.TimeoutExpired:
                return None
            finally:
                # Also its children; it may be gone already.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            printed.seek(0)
            text = printed.read(_OUTPUT_BYTES).decode(errors="replace")
            return text if process.returncode == 0 else None


@functools.cache
def network_is_blocked() -> bool:
    """Whether this machine lets `sandbox.py` cut a program off from the network."""
    probe = [sys.executable, "-I", sandbox.__file__, "--probe"]
    return subprocess.run(probe, stderr=subprocess.DEVNULL).returncode == 0


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
