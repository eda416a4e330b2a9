"""Who gets weights again, who is replaced and who ends the job when a transfer breaks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from plugin.config import JobConfig
from plugin.errors import ActorLost, EngineError, ParallelError, TransferError, WeightError
from plugin.launch import pulse, weight_sync
from plugin.launch.trainer_actor import SentPart
from plugin.launch.weight_sync import WeightSync
from plugin.rollout.engines.weight_stream import MeetingPoint, WeightGroup


class Call:
    """A call that answers what `answer` returns or raises, or never if that is None."""

    def __init__(self, answer: Callable[[], Any] | None) -> None:
        self.answer = answer


class Engines:
    """Two engines; `script` maps the number of a transfer and an engine to what becomes of it."""

    def __init__(self, script: dict[tuple[int, int], Any]) -> None:
        self.script, self.transfers, self.groups = script, 0, []
        self.versions: dict[int, int | None] = {0: None, 1: None}
        self.replaced: list[int] = []
        self.actors = {0: "actor 0", 1: "actor 1"}
        self.newest = -1
        self.catch_up = None
        self.frozen: set[str] = set()

    def begin_version(self, version: int) -> None:
        self.newest = version

    def lagging(self) -> list[int]:
        return [n for n, version in self.versions.items() if version != self.newest]

    def count_receivers(self) -> list[tuple[int, Any, Any]]:
        return [(n, self.actors[n], Call(lambda n=n: 1 + n)) for n in self.lagging()]

    def receive_weights(self, engine: int, actor: Any, group: WeightGroup, first: int) -> Call:
        if not self.groups or group is not self.groups[-1]:
            self.transfers += 1
            self.groups.append(group)
        self.places = [*getattr(self, "places", []), (self.transfers, engine, first)]
        return Call(self.script.get((self.transfers, engine), lambda: None))

    def ping(self, actor: str) -> Call:
        return Call(None if actor in self.frozen else lambda: None)

    def has_received(self, engine: int, actor: Any) -> None:
        if self.actors[engine] == actor:
            self.versions[engine] = self.newest

    def replace_unless_done(self, engine: int, actor: Any, reason: str) -> None:
        self.replaced.append(engine)
        self.actors[engine] = f"{actor}, again"

    def poll(self) -> None:
        pass


class Trainer:
    def __init__(self, script: dict[int, Any] | None = None) -> None:
        self.script, self.sent = script or {}, 0

    def rank_ids(self) -> list[str]:
        return ["rank"]

    def while_idle(self) -> None:
        pass

    def send_weights(self, version: int, group: WeightGroup) -> dict[Call, str]:
        self.sent += 1
        return {Call(self.script.get(self.sent, lambda: SentPart(0, 100, 2))): "rank 0"}


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(calls: list[Call], *, num_returns: int, timeout: float) -> Any:
        return [call for call in calls if call.answer is not None][:num_returns], []

    node = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(wait=wait, util=node))
    monkeypatch.setattr(weight_sync, "result_of", lambda call, name, console: call.answer())


def raising(error: Exception) -> Callable[[], Any]:
    def answer() -> Any:
        raise error

    return answer


def sync_of(engines: Engines, trainer: Trainer, **settings: Any) -> WeightSync:
    config = JobConfig(weight_sync="broadcast", **settings)
    return WeightSync(config, trainer, engines, SimpleNamespace())  # type: ignore[arg-type]


def test_every_engine_gets_a_version_over_one_group_that_is_kept_for_the_next() -> None:
    engines, trainer = Engines({}), Trainer()
    sync = sync_of(engines, trainer)
    for version in (0, 1):
        sync.send(version, wait=True)
        assert engines.versions == {0: version, 1: version}
    # Engine 0 has one worker, so that engine 1 has the second and the third.
    assert engines.places == [(1, 0, 0), (1, 1, 1)] * 2
    [group] = engines.groups
    assert (group.senders, group.receivers) == (1, 3)
    assert sync.metrics()["weight_sync_bytes"] == 100


def test_a_lost_engine_is_replaced_and_all_that_lack_the_version_get_it_again() -> None:
    lost = {(1, 0): raising(ActorLost("died")), (1, 1): raising(TransferError("called off"))}
    engines, trainer = Engines(lost), Trainer({1: raising(TransferError("called off"))})
    sync_of(engines, trainer).send(0, wait=True)
    assert engines.replaced == [0] and engines.versions == {0: 0, 1: 0}
    assert trainer.sent == 2
    with pytest.raises(TransferError, match="called off: engine 0: died"):
        MeetingPoint(engines.groups[0]).meet("joined")


def test_an_engine_that_has_the_version_does_not_get_it_twice() -> None:
    engines = Engines({(1, 0): raising(ParallelError("broken"))})
    sync_of(engines, Trainer()).send(0, wait=True)
    assert engines.replaced == [0]
    assert engines.places == [(1, 0, 0), (1, 1, 1), (2, 0, 0)]


def test_a_lost_rank_is_raised_when_the_engines_have_ended() -> None:
    engines = Engines({(1, n): raising(TransferError("called off")) for n in (0, 1)})
    with pytest.raises(ActorLost, match="rank died"):
        sync_of(engines, Trainer({1: raising(ActorLost("rank died"))})).send(0, wait=True)
    assert not engines.replaced and engines.versions == {0: None, 1: None}


def test_weights_that_do_not_fit_end_the_job() -> None:
    engines = Engines({(1, 1): raising(WeightError("no such tensor"))})
    with pytest.raises(WeightError, match="no such tensor"):
        sync_of(engines, Trainer()).send(0, wait=True)


def test_an_engine_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sync, "_GRACE_SECONDS", 0.05)
    engines = Engines({(1, 1): None})
    sync_of(engines, Trainer(), step_timeout=0.05).send(0, wait=True)
    assert engines.replaced == [1] and engines.versions == {0: 0, 1: 0}


def test_a_frozen_engine_is_replaced_long_before_a_transfer_has_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pulse, "SILENCE_SECONDS", 0.05)
    engines = Engines({(1, 1): None})
    engines.frozen = {"actor 1"}
    sync = sync_of(engines, Trainer(), step_timeout=1e5)
    sync.send(0, wait=True)
    assert engines.replaced == [1] and engines.versions == {0: 0, 1: 0}
    with pytest.raises(TransferError, match="called off: engine 1 did not react"):
        MeetingPoint(engines.groups[0]).meet("joined")


def test_a_slow_engine_that_reacts_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "SILENCE_SECONDS", 0.02)
    monkeypatch.setattr(weight_sync, "_GRACE_SECONDS", 0.05)
    engines = Engines({(1, 1): None})
    sync = sync_of(engines, Trainer(), step_timeout=0.3)
    sync.send(0, wait=True)
    with pytest.raises(TransferError, match="called off: it took longer"):
        MeetingPoint(engines.groups[0]).meet("joined")


def test_transfers_that_always_break_end_the_job() -> None:
    engines = Engines({(n, 0): raising(TransferError("network")) for n in range(1, 9)})
    with pytest.raises(EngineError, match="could not be sent to engines 0 in 3 attempts"):
        sync_of(engines, Trainer(), max_restarts=2).send(0, wait=True)
