"""The terminal of a running job: what fits, what is colored, and what actors print and warn of."""

from __future__ import annotations

import io
import logging
import pickle
import re
import sys
import warnings
from typing import Any

import pytest

from plugin.cluster.remote_calls import _MESSAGES, Messages, ReportingActor, result_of
from plugin.errors import BatchError
from plugin.observe import console as console_module
from plugin.observe.console import Console, progress_line
from tests.unit.observe.test_console import METRICS

pytestmark = pytest.mark.hostile


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def shown(columns: int, monkeypatch: pytest.MonkeyPatch, step: int = 3) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    Console(stream).step({**METRICS, "step": step, "seconds": 2.0}, 9)
    return stream.getvalue()


@pytest.mark.parametrize("columns", [20, 40, 79, 81, 100, 132, 200])
def test_no_status_line_is_wider_than_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = shown(columns, monkeypatch)
    visible = re.sub(r"\x1b\[[0-9;]*[mK]|\r", "", written)
    assert len(visible) < columns and "step    3/9" in visible
    assert (columns > 80) == ("━" in visible)
    if columns >= 132:
        names = ("left", "reward", "length", "truncated", "grad norm", "mismatch kl")
        assert all(name in visible for name in names)


def test_no_field_is_cut_in_the_middle() -> None:
    for width in range(30, 160):
        line = progress_line(METRICS, 9, seconds_left=5.0, width=width)
        assert progress_line(METRICS, 9, seconds_left=5.0).startswith(line)
        assert re.search(r"(\d|%|left)$", line)


def test_no_color_reaches_a_file_or_who_asked_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[32m" in shown(120, monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in shown(120, monkeypatch)
    monkeypatch.delenv("NO_COLOR")
    stream, errors = io.StringIO(), io.StringIO()
    file = Console(stream, errors)
    file.step(METRICS, 3)
    file.warn("careful")
    assert "\x1b" not in stream.getvalue() + errors.getvalue()
    assert errors.getvalue() == "warning: careful\n"


def test_the_time_left_follows_the_steps_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    console = Console(stream)
    # 10 s for step 1, 30 s for step 2: 20 s each on average, 8 steps to go
    console.step({**METRICS, "step": 1, "seconds": 10.0}, 10)
    now[0] += 30
    console.step({**METRICS, "step": 2, "seconds": 30.0}, 10)
    # back at a checkpoint: what was seen before no longer counts
    now[0] += 5
    console.step({**METRICS, "step": 1, "seconds": 4.0}, 10)
    assert re.findall(r"[\d:]+ left", stream.getvalue()) == ["1:30 left", "2:40 left", "0:36 left"]


def test_no_print_of_a_rank_is_lost_or_drowns_the_steps() -> None:
    stream, errors = io.StringIO(), io.StringIO()
    messages = Messages(["too long"], [f"line {i}" for i in range(25)])
    messages.show(Console(stream, errors), "rank 1 on 127.0.0.1")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "rank 1 on 127.0.0.1: line 0"
    assert lines[20:] == ["rank 1 on 127.0.0.1: ... and 5 more lines"]
    assert errors.getvalue() == "warning: rank 1 on 127.0.0.1: too long\n"


def test_no_message_of_a_call_that_fails_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rank(ReportingActor):
        def work(self, fails: bool) -> int:
            print("seen", 1)
            print("no end yet", end="")
            warnings.warn("careful", stacklevel=1)
            if fails:
                raise BatchError("bad")
            return 5

    # An actor has its process for itself: what it changes is put back here.
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(logging.getLogger("plugin"), "handlers", [])
    with warnings.catch_warnings():
        rank = Rank()
        warnings.simplefilter("always")
        reported = rank.call("work", False)
        with pytest.raises(BatchError) as failed:
            rank.call("work", True)
    assert sys.stdout.getvalue().startswith("seen 1\n")
    assert (reported.value, reported.messages) == (5, Messages(["careful"], ["seen 1"]))
    carried = getattr(pickle.loads(pickle.dumps(failed.value)), _MESSAGES)
    assert carried == Messages(["careful"], ["no end yetseen 1"])


def test_the_driver_shows_the_messages_of_a_call_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    cause = BatchError("bad")
    cause.__dict__[_MESSAGES] = Messages(["careful"], ["seen"])
    failed = ray.exceptions.RayTaskError("call", "traceback", cause)

    def get(_: Any) -> Any:
        raise failed

    monkeypatch.setattr(ray, "get", get)
    stream, errors = io.StringIO(), io.StringIO()
    with pytest.raises(BatchError):
        result_of("reference", "rank 2", Console(stream, errors))
    assert (stream.getvalue(), errors.getvalue()) == (
        "rank 2: seen\n",
        "warning: rank 2: careful\n",
    )
