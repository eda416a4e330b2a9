"""An inference server as a child of this process: started, watched, ended with it."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from plugin.engines.servers import process_guard

_POLL_SECONDS, _PROBE_SECONDS = 0.25, 5.0
_END_SECONDS = 20.0
_LOG_CHARACTERS = 2000
#: The last line of a traceback, behind the prefix of a logger or not; what argparse says.
_EXCEPTION = re.compile(r"(?:^|\] )((?:[\w.]+(?:Error|Exception)|\S+: error): .+)", re.MULTILINE)


class ServerEnded(RuntimeError):
    """The server is gone or silent; a new one has to be started, by a new engine."""


def free_port() -> int:
    """A free port on loopback."""
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
        self._directory = directory
        self._reason: str | None = None
        self._closing, self._reading = threading.Event(), threading.Lock()
        log.parent.mkdir(parents=True, exist_ok=True)
        read, write = os.pipe()
        guard = [sys.executable, process_guard.__file__, str(write), str(directory), *command]
        with log.open("ab") as output:
            starter = subprocess.Popen(
                guard,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
                # Ctrl-C is for the job, which ends the server in its own time.
                start_new_session=True,
            )
        os.close(write)
        starter.wait()
        #: The guard ends the server when this is closed, with this process at the latest.
        self._lifeline = starter.stdin
        self._status = os.fdopen(read)
        self.guard = int(self._status.readline() or 0)
        self._over = False
        self._watcher: threading.Thread | None = None

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until it is healthy and go on watching; `ServerEnded` if it ends or takes longer."""
        deadline = time.monotonic() + timeout
        while not self._is_healthy():
            self.require_alive()
            if time.monotonic() > deadline:
                self.close()
                raise ServerEnded(
                    f"the server did not answer within {timeout:g} s (--load-timeout); "
                    f"{self._cause()}"
                )
            self._closing.wait(_POLL_SECONDS)
        self._watcher = threading.Thread(target=self._watch, name="server health", daemon=True)
        self._watcher.start()

    def require_alive(self) -> None:
        """`ServerEnded` with the cause in its log unless the server runs."""
        if self._has_ended() or self._reason is not None:
            raise ServerEnded(f"the server {self._reason or 'was ended'}; {self._cause()}")

    def _has_ended(self, seconds: float = 0.0) -> bool:
        """Whether the server and its guard have ended; waits up to `seconds` for it."""
        with self._reading:
            if not self._over and select.select([self._status], [], [], seconds)[0]:
                code = self._status.readline().strip()
                self._reason = self._reason or f"ended with code {code or 'unknown, by a signal'}"
                self._over = True
                # Unless a guard that was killed has left it.
                shutil.rmtree(self._directory, ignore_errors=True)
            return self._over

    def close(self) -> None:
        """End the server with all its processes."""
        self._closing.set()
        if self._lifeline is not None:
            self._lifeline.close()
        if not self._has_ended(_END_SECONDS):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.guard, signal.SIGKILL)
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()

    def _watch(self) -> None:
        """End a server that is silent for too long, so that nobody waits for its answers."""
        heard = time.monotonic()
        while not self._closing.wait(_POLL_SECONDS) and not self._has_ended():
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

    def _cause(self) -> str:
        """The last exception in the log that does not refer to another one, or the log's end."""
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        # A process that lost its worker says so after the worker's own exception.
        found = [line for line in _EXCEPTION.findall(text) if "root cause" not in line]
        if found:
            return f"{found[-1][:_LOG_CHARACTERS]} (its log: {self._log})"
        return f"the end of its log {self._log}:\n{text[-_LOG_CHARACTERS:].strip() or '(empty)'}"
