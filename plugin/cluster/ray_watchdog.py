"""Notices that Ray itself has died or does not answer, which no call of Ray may survive.

A call that needs the raylet (`ray.put`, the start of an actor) waits for a frozen one for ever, in
code that no exception reaches, and Ray ends the process without one soon after its raylet has died
or a minute after the GCS has. So a thread looks, and says what it found before it ends the process.
"""

from __future__ import annotations

import functools
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

_LOOK_SECONDS = 0.1
_ASK_SECONDS = 5.0
#: A stop of this whole process (Ctrl-Z, a machine that sleeps) is no silence of Ray.
_LONGEST_TICK = 1.0


class RayWatchdog:
    """Watches the Ray that this process is connected to, from `start` to `stop`.

    timeout: seconds that the GCS may be silent; Ray's processes here may be stopped for half
    lost: called with the cause, once, from the watchdog's thread; does not return in a job
    """

    def __init__(self, timeout: float, lost: Callable[[str], None]) -> None:
        self._timeout, self._lost = timeout, lost
        self._over = threading.Event()
        self._answers = 0
        self._node_is_dead = False
        self._silent, self._stopped = 0.0, 0.0
        self._answers_before = 0

    def start(self) -> None:
        """Watch, in threads that end with the process or with `stop`."""
        for work in (self._ask, self._watch):
            threading.Thread(target=work, name="ray watchdog", daemon=True).start()

    def stop(self) -> None:
        """End the watch; what Ray does from now on is nobody's concern."""
        self._over.set()

    def _ask(self) -> None:
        """Ask the GCS over and over, in a thread that waits for it."""
        import ray

        while not self._over.is_set():
            try:
                own = ray.get_runtime_context().get_node_id()
                alive = {node["NodeID"]: node["Alive"] for node in ray.nodes()}
                self._node_is_dead = not alive.get(own, True)
                self._answers += 1
            except Exception:  # whatever Ray raises where the GCS is not there: no answer
                pass
            self._over.wait(_ASK_SECONDS)

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._over.wait(_LOOK_SECONDS):
            now = time.monotonic()
            cause = self.look(min(now - before, _LONGEST_TICK))
            before = now
            if cause is not None and not self._over.is_set():
                self._over.set()
                self._lost(cause)

    def look(self, seconds: float) -> str | None:
        """What is wrong with Ray, if anything; `seconds` have passed since the last look."""
        processes = watched_processes()
        for name, pid in processes.items():
            if _state(pid) in ("", "Z", "X"):
                return f"Ray's {name} (process {pid}) died; it was killed, or memory was short"
        stopped = [name for name, pid in processes.items() if _state(pid) == "T"]
        self._stopped = self._stopped + seconds if stopped else 0.0
        if self._stopped > self._timeout / 2:
            return f"Ray's {stopped[0]} was stopped (SIGSTOP) {self._stopped:.0f} s ago"
        if self._node_is_dead:
            return (
                "Ray's raylet on this machine did not answer Ray's health checks; it is frozen, or "
                "the machine overloaded"
            )
        moved = self._answers != self._answers_before
        self._answers_before = self._answers
        self._silent = 0.0 if moved else self._silent + seconds
        if self._silent > self._timeout + _ASK_SECONDS:
            return f"Ray's GCS did not answer for {self._timeout:g} s (--ray-timeout)"
        return None


def watched_processes() -> dict[str, int]:
    """Ray's processes on this machine that the job needs, by name.

    Those that this process started; of a cluster that it joined, the raylet of this machine.
    """
    import ray._private.worker

    node = ray._private.worker._global_node
    if node is None:
        return {}
    names = {"raylet": "raylet", "gcs_server": "GCS"}
    started = {
        names[kind]: infos[0].process.pid
        for kind, infos in node.all_processes.items()
        if kind in names and infos
    }
    return started or _raylet_behind(node.raylet_socket_name)


@functools.cache
def _raylet_behind(path: str) -> dict[str, int]:
    """The process that listens on Ray's socket; none where its number cannot be known.

    The kernel accepts the connection and tells the number, also for a process that is frozen.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(path)
            about = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        except (OSError, AttributeError):  # not there, or not Linux
            return {}
    pid = struct.unpack("3i", about)[0]
    return {"raylet": pid} if pid > 0 else {}  # 0: it is in other namespaces


def _state(pid: int) -> str:
    """The state letter of a process, such as T for one that is stopped; "" = there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]
