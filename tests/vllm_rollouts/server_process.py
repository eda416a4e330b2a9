"""A real vLLM server on loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_START_SECONDS = 600


def free_port() -> int:
    """A port that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def vllm_server(
    model: Path, *options: str, logprobs_mode: str = "processed_logprobs"
) -> Iterator[str]:
    """The URL of a server of `model`, in development mode; ended with all its processes."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init"),
        *("--dtype", "float32", "--logprobs-mode", logprobs_mode, "--enforce-eager"),
        *("--generation-config", "vllm", "--kv-cache-memory-bytes", str(64 << 20)),
        *("--distributed-executor-backend", "uni", *options),
    ]
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    log = model.parent / f"server-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_ready(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        _end(process)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            ended = process.poll() is not None
            if ended or time.monotonic() > deadline:
                raise AssertionError(
                    f"the server did not start:\n{log.read_text()[-4000:]}"
                ) from None
            time.sleep(1)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks the server to end; what remains of its process group is killed."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
