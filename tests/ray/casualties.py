"""Killing parts of a running job, and accounting for its prompts afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from plugin.observe.run_record import read_prompts


def workers(name: str, parent: int | None = None) -> list[psutil.Process]:
    """Ray worker processes below `parent` (this process) that run the actor class `name`."""
    found = []
    for process in psutil.Process(parent).children(recursive=True):
        try:
            if any(f"ray::{name}" in part for part in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill_one(name: str, how: int = signal.SIGKILL, parent: int | None = None) -> int:
    """Sends a signal to one worker and returns its process id; waits for one to be there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        living = [p for p in workers(name, parent) if p.status() != psutil.STATUS_STOPPED]
        if living:
            os.kill(living[-1].pid, how)
            return living[-1].pid
        time.sleep(0.1)
    raise AssertionError(f"no worker runs {name}")


class AfterSteps:
    """Calls `action` once, from a thread, when a run has logged so many steps."""

    def __init__(self, run_dir: Path, steps: int, action: Callable[[], object]) -> None:
        self._metrics, self._steps, self._action = run_dir / "metrics.jsonl", steps, action
        self.done = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> AfterSteps:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=90)

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            if logged_steps(self._metrics) >= self._steps:
                self._action()
                self.done = True
                return


def logged_steps(metrics: Path) -> int:
    """Steps in a metrics file, without the evaluations; 0 before it exists."""
    lines = metrics.read_bytes().splitlines() if metrics.exists() else []
    return sum(b'"eval/' not in line for line in lines)


def trained_prompts(run_dir: Path) -> list[int]:
    """Numbers of the prompts trained on, in order; of a rollout that was repeated the last record counts."""
    return [index for record in read_prompts(run_dir) for index in record["trained"]]


def dropped_prompts(run_dir: Path) -> list[int]:
    """Numbers of the prompts dropped, whatever the cause."""
    records = read_prompts(run_dir)
    return [index for record in records for cause in record["dropped"].values() for index in cause]
