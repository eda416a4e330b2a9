"""What the pool knows of groups at engines, and tells the queue when an engine is replaced."""

from __future__ import annotations

import math
import sys
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from plugin.cluster import assignments as assignments_module
from plugin.cluster import engine_pool, remote_calls
from plugin.cluster.assignments import Assignments
from plugin.cluster.engine_pool import EnginePool, _Running
from plugin.cluster.remote_calls import Messages, Reported, wait_for_all
from plugin.config.engines import TransportTraits
from plugin.errors import ActorLost, EngineError, TransferError
from plugin.observe.console import Console

pytestmark = pytest.mark.usefixtures("jumping_clock")


class Call:
    """A call that never ends."""

    def future(self) -> Future[Any]:
        return Future()


class FutureCall(Call):
    """A call that ends when `ended` does."""

    def __init__(self, ended: Future[Any]) -> None:
        self._ended = ended

    def future(self) -> Future[Any]:
        return self._ended


def loads(pool: EnginePool) -> dict[int, int]:
    """How many groups each engine has."""
    return {number: pool._assignments.load(number) for number in range(len(pool))}


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> EnginePool:
    """Two engines whose calls never answer."""

    def remote(*_: Any) -> Any:
        return Call()

    def actor() -> Any:
        call = SimpleNamespace(remote=remote, options=lambda **_: SimpleNamespace(remote=remote))
        apart = SimpleNamespace(remote=lambda *given: (remote(*given), object()))
        call_apart = SimpleNamespace(options=lambda **_: apart)
        return SimpleNamespace(call=call, call_apart=call_apart)

    def start(self: EnginePool, number: int, failures_in_a_row: int = 0) -> Any:
        made = _Running(actor(), Call(), math.inf, failures_in_a_row)
        made.end = lambda: None  # type: ignore[method-assign]
        return made

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(wait=lambda *_, **__: ([], [])))
    monkeypatch.setattr(EnginePool, "_start", start)
    config: Any = SimpleNamespace(
        engine_patience=5.0, num_rollout_engines=2, max_restarts=3, transport_traits=TransportTraits("objects"),
        rollout_api_key_env=None, colocate=False, min_rollout_engines=1, start_timeout=9.0, load_patience=9.0, wants_rollout_routes=False,
    )  # fmt: skip
    monkeypatch.setattr(engine_pool, "api_key", lambda _: None)
    console: Any = SimpleNamespace(log=lambda _: None, warn=lambda _: None)
    plan: Any = SimpleNamespace(fewest_engines=None)
    made: Any = EnginePool(config, {}, plan, SimpleNamespace(), console)  # type: ignore[arg-type]
    for number, engine in enumerate(made._engines):
        engine.starting = None
        made._update(number)
    made._starts.clear()
    return made


def test_the_groups_of_an_engine_that_is_replaced_for_any_reason_come_back_as_lost(
    pool: EnginePool,
) -> None:
    requests: Any = {3: "a", 4: "b"}
    pool.send(0, requests, SimpleNamespace())  # type: ignore[arg-type]
    pool.send(1, {7: "c"}, SimpleNamespace())  # type: ignore[arg-type, dict-item]
    assert loads(pool) == {0: 2, 1: 1}
    pool.replace(0, "did not load its weights in time")
    assert pool.receive(wait_seconds=0) == ([], [3, 4])
    assert loads(pool) == {0: 0, 1: 1} and pool.restarts == 1
    assert pool.receive(wait_seconds=0) == ([], [])


def test_canceled_groups_are_dropped_at_their_engines_and_are_not_lost_but_gone(
    pool: EnginePool,
) -> None:
    pool.send(0, {3: "a", 4: "b"}, SimpleNamespace())  # type: ignore[arg-type, dict-item]
    era = pool._engines[0].era
    pool.cancel_groups()
    assert loads(pool) == {0: 0, 1: 0} and pool.receive(wait_seconds=0) == ([], [])
    assert pool._engines[0].era > era and not pool._collects
    assert pool._engines[1].era == era, "an engine without groups is left alone"
    pool.send(0, {5: "c"}, SimpleNamespace())  # type: ignore[arg-type, dict-item]
    assert pool._engines[0].collects


def test_an_engine_that_is_silent_for_too_long_is_replaced(
    pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1000.0)
    time = SimpleNamespace(monotonic=lambda: clock.now, sleep=lambda _: None)
    monkeypatch.setattr(engine_pool, "time", time)
    monkeypatch.setattr(assignments_module, "time", time)
    pool.send(0, {3: "a"}, SimpleNamespace())  # type: ignore[arg-type, dict-item]
    clock.now += 4.0
    pool.send(1, {7: "c"}, SimpleNamespace())  # type: ignore[arg-type, dict-item]
    clock.now += 1.5
    assert pool.receive(wait_seconds=0) == ([], [3])
    assert loads(pool) == {0: 0, 1: 1}


def test_engines_get_their_time_again_after_the_driver_was_stopped(
    pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1000.0)
    time = SimpleNamespace(monotonic=lambda: clock.now, sleep=lambda _: None)
    monkeypatch.setattr(engine_pool, "time", time)
    monkeypatch.setattr(assignments_module, "time", time)
    pool.send(0, {3: "a"}, SimpleNamespace())  # type: ignore[arg-type, dict-item]
    for seconds, lost in ((0, []), (3600, []), (4.5, []), (1, [3])):
        clock.now += seconds
        assert pool.receive(wait_seconds=0) == ([], lost)


@pytest.mark.parametrize("was_stopped", [True, False])
def test_calls_get_their_time_again_after_the_driver_was_stopped(
    was_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, ended = SimpleNamespace(now=1000.0), Future[Any]()
    looks = iter([3600.0] if was_stopped else [10.0] * 7)

    def look() -> None:
        if (seconds := next(looks, None)) is None:
            ended.set_result(Reported("done", Messages([], [])))
        else:
            clock.now += seconds

    reference: Any = FutureCall(ended)
    monkeypatch.setattr(remote_calls, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(remote_calls.EndedCalls, "_sweep", lambda self: None)
    monkeypatch.setattr(remote_calls, "_POLL_SECONDS", 0.001)

    def wait() -> list[Any]:
        return wait_for_all([reference], ["rank 0"], Console(), timeout=60, while_waiting=look)

    if was_stopped:
        assert wait() == ["done"]
    else:
        with pytest.raises(ActorLost, match="rank 0 did not answer within 60 s"):
            wait()


def test_a_group_that_is_sent_again_belongs_to_its_new_engine() -> None:
    assignments = Assignments(math.inf)
    assignments.add(0, [1, 2])
    assert assignments.remove_lost(0) == [1, 2]
    assignments.add(1, [2])
    assignments.remove_answered(1, [2])
    assert not assignments.load(0) and not assignments.load(1) and assignments.remove_lost(1) == []


@pytest.mark.hostile
def test_a_frozen_engine_on_shared_devices_does_not_get_the_time_of_a_start(
    pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []
    pool._config.load_patience = 300.0  # type: ignore[misc]
    monkeypatch.setattr(
        engine_pool, "wait_for_all", lambda *_, timeout, **__: given.append(timeout) or [None]
    )
    pool.sleep(1)
    assert given == [5.0, 5.0]
    pool._engines[1].starting = object()
    pool.wake("weights")
    assert given[2:] == [305.0, 305.0]


def test_the_job_goes_on_without_an_engine_that_cannot_start_and_takes_it_back(
    pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = sys.modules["ray"]
    monkeypatch.setattr(fake, "cluster_resources", lambda: {"CPU": 2.0}, raising=False)
    monkeypatch.setattr(engine_pool, "result_of", lambda *_: None)
    pool.send(0, {3: "a"}, SimpleNamespace())  # type: ignore[arg-type, dict-item]
    pool.replace(0, "its node left the cluster")
    assert len(pool) == 2  # it is about to be there again
    pool._engines[0].deadline = -math.inf
    assert pool.receive(wait_seconds=0) == ([], [3])
    assert len(pool) == 1 and pool.least_loaded() == (1, 0)
    pool.send_weights(["bucket"])
    assert {number for number, _ in pool._loads.values()} == {1}
    pool.poll()  # an actor waits for room, as long as that takes
    [(call, _)] = pool._starts.items()
    assert pool._engines[0].is_absent and pool._engines[0].deadline == math.inf
    done: Future[Any] = Future()
    pool._ended.append((call, done))
    pool.poll()
    assert len(pool) == 2 and pool.least_loaded() == (0, 0)
    assert {number for number, _ in pool._loads.values()} == {0, 1}


def test_a_job_ends_with_fewer_engines_than_it_may_go_on_with(pool: EnginePool) -> None:
    pool._engines[1].failures_in_a_row = pool._engines[0].failures_in_a_row = 3
    pool.replace(1, "died")
    assert len(pool) == 1
    with pytest.raises(EngineError, match=r"engine 0 was restarted 3 times .* it died"):
        pool.replace(0, "died")


def test_only_engines_that_were_getting_weights_lose_their_groups_with_the_trainer(
    pool: EnginePool,
) -> None:
    pool.send(0, {3: "a"}, SimpleNamespace())  # type: ignore[arg-type, dict-item]
    pool.send(1, {7: "c"}, SimpleNamespace())  # type: ignore[arg-type, dict-item]
    pool._loads[Call()] = 1, pool._engines[1].actor
    pool.keep_groups()
    assert pool.receive(wait_seconds=0) == ([], [7]) and loads(pool) == {0: 1, 1: 0}


def test_a_job_that_starts_with_fewer_engines_takes_each_when_it_has_started(
    pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    pool._console = SimpleNamespace(log=said.append, warn=said.append)  # type: ignore[assignment]
    plan: Any = SimpleNamespace(fewest_engines=1)
    reservation: Any = SimpleNamespace(placed_engines=lambda: [0])
    pool._plan, pool._reservation = plan, reservation
    late = pool._engines[1] = pool._start(1)
    pool._watch_start(1)
    pool._start_without(pool._unplaced())
    assert len(pool) == 1 and pool.least_loaded() == (0, 0) and not pool._lost
    assert "room for 1 of 2 engines" in said[0]
    pool.poll()
    assert late.deadline == math.inf, "it may take as long as the node does"
    pool.begin_version(3)
    loaded: list[int] = []
    monkeypatch.setattr(EnginePool, "_load", lambda self, number: loaded.append(number))
    monkeypatch.setattr(engine_pool, "result_of", lambda *_: None)
    pool._end_start(late.starting, Future())
    assert len(pool) == 2 and loaded == [1] and said[1] == "engine 1 has joined: 2 of 2"
    pool.send(0, {3: "a"}, SimpleNamespace())  # type: ignore[arg-type, dict-item]
    assert pool.least_loaded() == (1, 0)
    assert pool.restarts == 0


def test_an_engine_whose_checksums_are_wrong_gets_the_same_buckets_again(
    pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def call(actor: Any, *arguments: Any) -> Call:
        asked.append(arguments)
        return Call()

    monkeypatch.setattr(pool, "_call_for_weights", call)
    probe: Any = object()
    monkeypatch.setattr(pool, "_probe_for", lambda number: probe)
    pool.begin_version(3)
    pool.send_weights(["first", "last"], {"a": 7})
    of_one = [
        ("load_weights", 3, "first", False, None),
        ("load_weights", 3, "last", True, probe, {"a": 7}),
    ]
    assert asked == of_one * 2
    [_, (last, _), *_] = pool._loads.items()

    def refuse(*_: Any) -> Any:
        raise TransferError("1 tensors are not the trainer's")

    monkeypatch.setattr(engine_pool, "result_of", refuse)
    asked.clear()
    pool._end_load(last, Future())
    # What it reports then is for the verification.
    assert asked == [
        ("load_weights", 3, "first", False, None, None, True),
        ("load_weights", 3, "last", True, probe, None, False),
    ]
    assert pool.repairs == 1 and pool.restarts == 0


def test_all_engines_are_verified_once_each_has_shown_its_weights(pool: EnginePool) -> None:
    assert pool.all_verified, "nothing is asked of them"
    pool.probe = object()  # type: ignore[assignment]
    assert not pool.all_verified
    pool._engines[0].is_verified = True
    assert not pool.all_verified
    pool._engines[1].is_absent = True
    assert pool.all_verified
