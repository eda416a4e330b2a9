"""An inference server as a child of this process: started, watched, ended with it."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from plugin.rollout.engines import process_guard

_POLL_SECONDS, _PROBE_SECONDS = 0.25, 5.0
_END_SECONDS = 20.0
_LOG_CHARACTERS = 2000


class ServerEnded(RuntimeError):
    """The server is gone or silent; a new one has to be started, by a new engine."""


def free_port() -> int:
    """A port of loopback that nothing listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """A server that answers `GET <url>/health`.

    command: what starts it; environment: that of the server
    directory: removed when the server has ended, however that comes about
    log: gets what it prints, after what is there
    silence: seconds without an answer to `/health` after which it is ended
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        url: str,
        *,
        directory: Path,
        log: Path,
        silence: float = 120.0,
    ) -> None:
        self._url, self._log, self._silence = url, log, silence
        self._reason: str | None = None
        self._closing = threading.Event()
        log.parent.mkdir(parents=True, exist_ok=True)
        guard = [sys.executable, process_guard.__file__, str(directory), *command]
        with log.open("ab") as output:
            self._guard = subprocess.Popen(
                guard,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the job, which ends the server in its own time.
                start_new_session=True,
            )
        self._watcher: threading.Thread | None = None

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until it is healthy and go on watching; `ServerEnded` if it ends or takes longer."""
        deadline = time.monotonic() + timeout
        while not self._is_healthy():
            self.require_alive()
            if time.monotonic() > deadline:
                self.close()
                raise ServerEnded(
                    f"the server did not answer within {timeout:g} s (--start-timeout); the end of "
                    f"its log {self._log}:\n{self._end_of_log()}"
                )
            self._closing.wait(_POLL_SECONDS)
        self._watcher = threading.Thread(target=self._watch, name="server health", daemon=True)
        self._watcher.start()

    def require_alive(self) -> None:
        """`ServerEnded` with the end of its log unless the server runs."""
        code = self._guard.poll()
        if code is not None or self._reason is not None:
            raise ServerEnded(
                f"the server {self._reason or f'ended with code {code}'}; the end of its log "
                f"{self._log}:\n{self._end_of_log()}"
            )

    def close(self) -> None:
        """End the server with all its processes."""
        self._closing.set()
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        try:
            self._guard.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()

    def _watch(self) -> None:
        """Give up a server that is silent for too long, so that nobody waits for its answers."""
        heard = time.monotonic()
        while not self._closing.wait(_POLL_SECONDS) and self._guard.poll() is None:
            if self._is_healthy():
                heard = time.monotonic()
            elif time.monotonic() - heard > self._silence:
                self._reason = f"did not answer /health for {self._silence:g} s and was ended"
                self.close()

    def _is_healthy(self) -> bool:
        try:
            seconds = min(_PROBE_SECONDS, self._silence)
            with urllib.request.urlopen(f"{self._url}/health", timeout=seconds) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _end_of_log(self) -> str:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return text[-_LOG_CHARACTERS:].strip() or "(empty)"
