"""What a plan is at: one line on a terminal, one line per layout elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_WIDTH = 24


class Progress:
    """Writes to standard error; `end` clears what is left of it on a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._began: float | None = None

    def __call__(self, what: str) -> None:
        """One plan: said on a terminal only."""
        if self._terminal:
            self._rewrite(f"planning {what} ...")

    def layout(self, number: int, total: int, name: str) -> None:
        """Layout `number` of `total` begins."""
        now = time.monotonic()
        self._began = self._began or now
        if not self._terminal:
            print(f"{number}/{total}: {name}", file=self._stream, flush=True)
            return
        full = _WIDTH * (number - 1) // total
        left = ""
        if number > 1:
            seconds = (now - self._began) / (number - 1) * (total - number + 1)
            left = f", {seconds:.0f} s left"
        bar = "#" * full + "-" * (_WIDTH - full)
        self._rewrite(f"[{bar}] {number}/{total} {name}{left}")

    def end(self) -> None:
        """Clear the line."""
        if self._terminal:
            self._rewrite("")

    def _rewrite(self, line: str) -> None:
        print(f"\r{line}\x1b[K", end="", file=self._stream, flush=True)
