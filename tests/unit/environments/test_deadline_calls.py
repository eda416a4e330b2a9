"""Calls side by side, each with its own deadline."""

from __future__ import annotations

import threading

import pytest

from plugin.environments.deadline_calls import CallFailure, run_calls

pytestmark = pytest.mark.usefixtures("jumping_clock")


def test_results_come_in_the_order_of_the_calls() -> None:
    first_may_end = threading.Event()

    def first() -> str:
        first_may_end.wait(30)
        return "first"

    def second() -> str:
        first_may_end.set()
        return "second"

    assert run_calls([first, second], seconds=30, threads=2) == ["first", "second"]


def test_a_call_that_hangs_loses_its_own_result_and_blocks_nobody() -> None:
    forever = threading.Event()
    calls = [lambda: forever.wait(60), lambda: 2, lambda: 3]
    # One thread: the others get their turn only because the one that hangs is abandoned.
    results = run_calls(calls, seconds=0.1, threads=1)
    assert results == [CallFailure("no answer within 0.1 seconds"), 2, 3]
    forever.set()


def test_no_more_than_so_many_calls_run_at_once() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def call() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.005)
        with lock:
            running -= 1

    run_calls([call] * 12, seconds=30, threads=3)
    assert 1 <= most <= 3


def test_an_exception_is_a_failure_with_its_name() -> None:
    def fails() -> int:
        raise KeyError("missing")

    assert run_calls([fails, lambda: 1], seconds=30, threads=2) == [
        CallFailure("KeyError: 'missing'"),
        1,
    ]
    assert run_calls([], seconds=1, threads=1) == []
