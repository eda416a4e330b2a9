"""What a person sees of a running job: steps, messages and warnings go through one `Console`."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

_SECONDS_BETWEEN_LINES = 2.0
_SPINNER, _SECONDS_BETWEEN_MARKS = "|/-\\", 0.2


def progress_line(metrics: Mapping[str, Any], total: int) -> str:
    """Step, reward, loss, mismatch KL, clipped fraction, tokens/s and staleness."""
    names = ("is_masked", "tis_clipfrac", "pg_clipfrac")
    fields = (
        ("reward", metrics.get("reward"), "{:.3f}"),
        ("loss", metrics.get("loss"), "{:+.4f}"),
        ("mismatch kl", metrics.get("mismatch_kl"), "{:.1e}"),
        ("clipped", next((metrics[n] for n in names if n in metrics), None), "{:.1%}"),
        ("tokens/s", metrics.get("tokens_per_second"), "{:.0f}"),
        ("staleness", metrics.get("staleness"), "{:.1f}"),
    )
    shown = [
        f"{name} {'-' if value is None or math.isnan(value) else form.format(value)}"
        for name, value, form in fields
    ]
    return f"step {int(metrics['step']):4d}/{total}  " + "  ".join(shown)


class Console:
    """Steps and messages on `stream`, warnings on `errors`.

    Steps rewrite one line of a terminal; elsewhere there is at most one line in two seconds.
    """

    def __init__(self, stream: TextIO | None = None, errors: TextIO | None = None) -> None:
        self._stream, self._errors = stream or sys.stdout, errors or sys.stderr
        self.began = time.monotonic()
        self._last = -math.inf
        self._open_line = False
        self._warned: set[str] = set()

    def step(self, metrics: Mapping[str, Any], total: int) -> None:
        """Show one step of `total`."""
        line = progress_line(metrics, total)
        is_last = int(metrics["step"]) >= total
        if self._stream.isatty():
            self._stream.write("\r" + line.ljust(118))
            self._open_line = True
        elif is_last or time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES:
            self._stream.write(line + "\n")
            self._last = time.monotonic()
        self._stream.flush()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show what is going on and, at its end, the seconds it took; a terminal counts them."""
        began, over = time.monotonic(), threading.Event()

        def spin() -> None:
            for mark in itertools.cycle(_SPINNER):
                self._stream.write(f"\r{mark} {name} {time.monotonic() - began:.0f} s ")
                self._stream.flush()
                self._open_line = True
                if over.wait(_SECONDS_BETWEEN_MARKS):
                    return

        spinner = threading.Thread(target=spin, daemon=True)
        if self._stream.isatty():
            spinner.start()
        end = "failed after"
        try:
            yield
            end = "took"
        finally:
            over.set()
            if spinner.ident:
                spinner.join()
                self._stream.write("\r")
                self._open_line = False
            self.say(f"{name} {end} {time.monotonic() - began:.1f} s")

    def say(self, text: str) -> None:
        """Print a message on a line of its own."""
        self._stream.write(("\n" if self._open_line else "") + text + "\n")
        self._open_line = False
        self._stream.flush()

    def warn(self, text: str, source: str | None = None) -> None:
        """Print a warning the first time its text comes up; `source`: the actor that raised it."""
        if text in self._warned:
            return
        self._warned.add(text)
        self.complain("warning", f"{source}: {text}" if source else text)

    def complain(self, kind: str, text: str) -> None:
        """Print `kind: text` where errors go."""
        if self._open_line:
            self.say("")
        print(f"{kind}: {text}", file=self._errors, flush=True)


def capture_warnings(deliver: Callable[[str], None]) -> None:
    """Send what this process warns of from now on, by `warnings` or by our loggers, to `deliver`.

    Of `warnings` only plain UserWarnings, because the other categories are for developers; and not
    those of Megatron, which names every optional package that it does without.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(megatron|mbridge)\.")

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if category is UserWarning:
            deliver(str(message))

    class Deliver(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            deliver(record.getMessage())

    warnings.showwarning = show
    logging.getLogger("plugin").addHandler(Deliver(logging.WARNING))
