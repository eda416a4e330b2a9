"""What a person sees while a job runs: one line per step, or one that is rewritten on a terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

_SECONDS_BETWEEN_LINES = 2.0


def progress_line(metrics: Mapping[str, Any], total: int) -> str:
    """Step, reward, loss, mismatch KL, clipped fraction, tokens/s and staleness."""
    clipped = next(
        (metrics[n] for n in ("is_masked", "tis_clipfrac", "pg_clipfrac") if n in metrics), None
    )
    fields = (
        ("reward", metrics.get("reward"), "{:.3f}"),
        ("loss", metrics.get("loss"), "{:+.4f}"),
        ("mismatch kl", metrics.get("mismatch_kl"), "{:.1e}"),
        ("clipped", clipped, "{:.1%}"),
        ("tokens/s", metrics.get("tokens_per_second"), "{:.0f}"),
        ("staleness", metrics.get("staleness"), "{:.1f}"),
    )
    shown = [f"{name} {_formatted(value, form)}" for name, value, form in fields]
    return f"step {int(metrics['step']):4d}/{total}  " + "  ".join(shown)


def _formatted(value: Any, form: str) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return form.format(value)


class ProgressPrinter:
    """Prints steps: rewritten in place on a terminal, at most one line in two seconds elsewhere."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total = total
        self._stream = stream or sys.stdout
        self._last = -math.inf
        self._open_line = False

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Shows one step."""
        line = progress_line(metrics, self._total)
        is_last = int(metrics["step"]) >= self._total
        if self._stream.isatty():
            self._stream.write("\r" + line.ljust(118))
            self._open_line = True
        elif is_last or time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES:
            self._stream.write(line + "\n")
            self._last = time.monotonic()
        self._stream.flush()

    def say(self, text: str) -> None:
        """A message on a line of its own."""
        self._stream.write(("\n" if self._open_line else "") + text + "\n")
        self._open_line = False
        self._stream.flush()
