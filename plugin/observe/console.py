"""Terminal output: progress line, messages and warnings of a job; tables."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from plugin.observe.metric_table import CONSOLE

_SECONDS_BETWEEN_LINES = 2.0
_SPINNER, _SECONDS_BETWEEN_MARKS = "|/-\\", 0.2
_BAR_WIDTH = 20
_NARROW = 80
_COLORS = {"warning": "\x1b[33m", "error": "\x1b[31m", "bar": "\x1b[32m", "off": "\x1b[0m"}


def text_table(rows: Sequence[Sequence[str]], left: tuple[int, ...] = (0,)) -> list[str]:
    """One line per row; columns are right-aligned, those in `left` left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def progress_line(
    metrics: Mapping[str, Any],
    total: int,
    *,
    seconds_left: float | None = None,
    width: int | None = None,
) -> str:
    """Step, time left, and the metrics of `metric_table.CONSOLE`.

    width: columns of the terminal; trailing fields that do not fit are dropped
    """
    line = f"step {int(metrics['step']):4d}/{total}"
    if seconds_left is not None:
        line += f"  {_duration(seconds_left)} left"
    for label, names, form in CONSOLE:
        value = next((metrics[name] for name in names if name in metrics), None)
        field = f"  {label} {'-' if value is None or math.isnan(value) else form.format(value)}"
        if width is not None and len(line) + len(field) > width:
            break
        line += field
    return line if width is None else line[:width]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Console:
    """Steps and messages on `stream`, warnings on `errors`.

    Steps rewrite one line of a terminal, with a bar where there is room; elsewhere there is at most
    one line in two seconds, and never a color (nor with NO_COLOR in the environment).
    """

    def __init__(self, stream: TextIO | None = None, errors: TextIO | None = None) -> None:
        self._stream, self._errors = stream or sys.stdout, errors or sys.stderr
        self.began = time.monotonic()
        self._last = -math.inf
        self._first, self._latest = (0, 0.0), sys.maxsize
        self._open_line = False
        self._warned: set[str] = set()

    def step(self, metrics: Mapping[str, Any], total: int) -> None:
        """Show one step of `total`."""
        step, now = int(metrics["step"]), time.monotonic()
        left = self._seconds_left(step, total, now, float(metrics.get("seconds", 0.0)))
        if _is_terminal(self._stream):
            self._stream.write(f"\r{self._with_bar(metrics, total, left)}\x1b[K")
            self._open_line = True
        elif step >= total or now - self._last >= _SECONDS_BETWEEN_LINES:
            self._stream.write(progress_line(metrics, total, seconds_left=left) + "\n")
            self._last = now
        self._stream.flush()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show a phase and the seconds it took; a terminal counts them live."""
        began, over = time.monotonic(), threading.Event()

        def spin() -> None:
            for mark in itertools.cycle(_SPINNER):
                self._stream.write(f"\r{mark} {name} {time.monotonic() - began:.0f} s ")
                self._stream.flush()
                self._open_line = True
                if over.wait(_SECONDS_BETWEEN_MARKS):
                    return

        spinner = threading.Thread(target=spin, daemon=True)
        if _is_terminal(self._stream):
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
            self.log(f"{name} {end} {time.monotonic() - began:.1f} s")

    def _seconds_left(self, step: int, total: int, now: float, seconds: float) -> float:
        """By the mean of the steps since the first; going back to a checkpoint resets it."""
        if step <= self._latest:
            self._first = (step - 1, now - seconds)
        self._latest = step
        begun, start = self._first
        return max(0, total - step) * (now - start) / (step - begun)

    def _with_bar(self, metrics: Mapping[str, Any], total: int, left: float) -> str:
        # One column stays free: some terminals wrap when the last one is written.
        width = shutil.get_terminal_size((120, 24)).columns - 1
        if width < _NARROW:
            return progress_line(metrics, total, seconds_left=left, width=width)
        filled = min(_BAR_WIDTH, _BAR_WIDTH * int(metrics["step"]) // total)
        bar = self._colored("bar", "━" * filled) + "╌" * (_BAR_WIDTH - filled)
        if "utf" not in (getattr(self._stream, "encoding", None) or "utf-8").lower():
            bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        room = width - _BAR_WIDTH - 1
        return f"{bar} {progress_line(metrics, total, seconds_left=left, width=room)}"

    def log(self, text: str) -> None:
        """Print a message on a line of its own."""
        self._stream.write(("\n" if self._open_line else "") + text + "\n")
        self._open_line = False
        self._stream.flush()

    def warn(self, text: str, source: str | None = None) -> None:
        """Print a warning the first time its text comes up; `source`: the actor that raised it."""
        if text in self._warned:
            return
        self._warned.add(text)
        self._report("warning", f"{source}: {text}" if source else text)

    def error(self, text: str) -> None:
        """Print an error."""
        self._report("error", text)

    def _report(self, kind: str, text: str) -> None:
        if self._open_line:
            self.log("")
        print(f"{self._colored(kind, f'{kind}:', self._errors)} {text}", file=self._errors)
        self._errors.flush()

    def _colored(self, kind: str, text: str, stream: TextIO | None = None) -> str:
        if os.environ.get("NO_COLOR") or not _is_terminal(stream or self._stream):
            return text
        return f"{_COLORS[kind]}{text}{_COLORS['off']}" if kind in _COLORS else text


def _is_terminal(stream: TextIO) -> bool:
    """Whether lines can be rewritten and colored there."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class PrintedLines:
    """Replaces `sys.stdout` of an actor: lines are still printed, and also sent to `deliver`."""

    def __init__(self, stream: Any, deliver: Callable[[str], None]) -> None:
        self._stream, self._deliver, self._rest = stream, deliver, ""

    def write(self, text: str) -> int:
        """Write `text`, and deliver every line that it completes."""
        self._stream.write(text)
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._deliver(line)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def capture_warnings(deliver: Callable[[str], None]) -> contextlib.ExitStack:
    """Send the warnings of this process, from `warnings` and our loggers, to `deliver`.

    From now on, until the returned stack is closed. Of `warnings` only plain UserWarnings, because
    the other categories are for developers; and not those of Megatron, which names every optional
    package that it does without.
    """
    captured = contextlib.ExitStack()
    captured.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(megatron|mbridge)\.")

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if category is UserWarning:
            deliver(str(message))

    class Deliver(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            deliver(record.getMessage())

    warnings.showwarning = show
    logger, handler = logging.getLogger("plugin"), Deliver(logging.WARNING)
    logger.addHandler(handler)
    captured.callback(logger.removeHandler, handler)
    return captured
