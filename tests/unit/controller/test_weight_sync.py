"""Who gets weights again, who is replaced and who ends the job when a transfer breaks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from plugin.cluster import remote_calls
from plugin.cluster.trainer_actor import SentPart
from plugin.config import JobConfig
from plugin.controller import weight_sync
from plugin.controller.weight_sync import WeightSync
from plugin.engines.weight_changes import ProbeAnswer
from plugin.errors import (
    ActorLost,
    DeltaError,
    EngineError,
    FindingError,
    ParallelError,
    TransferError,
    WeightError,
)
from plugin.weights.delta import Changes
from plugin.weights.group import GroupStore, WeightGroup

pytestmark = pytest.mark.usefixtures("jumping_clock")


class Call:
    """A call that answers what `answer` returns or raises, or never if that is None."""

    def __init__(self, answer: Callable[[], Any] | None) -> None:
        self.answer = answer

    def future(self) -> Future[Any]:
        future: Future[Any] = Future()
        if self.answer is not None:
            future.set_result(None)
        return future


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
        self.devices = {0: ["GPU-a", "GPU-b"], 1: ["GPU-c"]}
        self.any_probe_due, self.repairs = False, 0
        self.again: list[int] = []
        self.probed: dict[int, Any] = {}

    def begin_version(self, version: int) -> None:
        self.newest = version

    def lagging(self) -> list[int]:
        return [n for n, version in self.versions.items() if version != self.newest]

    def lagging_and_started(self) -> list[int]:
        return self.lagging()

    def ask_lagging(self, method: str) -> list[tuple[int, Any, Any]]:
        answers = {"weight_receivers": lambda n: 1 + n, "weight_devices": self.devices.get}
        return [(n, self.actors[n], Call(partial(answers[method], n))) for n in self.lagging()]

    def receive_weights(
        self, engine: int, actor: Any, group: WeightGroup, first: int, *, again: bool = False
    ) -> Call:
        self.again += [engine] if again else []
        if not self.groups or group is not self.groups[-1]:
            self.transfers += 1
            self.groups.append(group)
        self.places = [*getattr(self, "places", []), (self.transfers, engine, first)]
        return Call(self.script.get((self.transfers, engine), lambda: None))

    def ping(self, actor: str) -> Call:
        return Call(None if actor in self.frozen else lambda: None)

    def has_received(self, engine: int, actor: Any, answers: Any) -> None:
        if self.actors[engine] == actor:
            self.versions[engine] = self.newest
            self.probed[engine] = answers

    def replace_unless_done(self, engine: int, actor: Any, reason: str) -> None:
        self.replaced.append(engine)
        self.actors[engine] = f"{actor}, again"

    def poll(self) -> None:
        pass


class Trainer:
    on_gpu = False

    def __init__(self, script: dict[int, Any] | None = None) -> None:
        self.script, self.sent = script or {}, 0
        self.with_base: list[bool] = []
        self.checksum_dtypes: list[str | None] = []
        self.since: list[int | None] = []
        self.ranks = ["rank"]

    def rank_ids(self) -> list[str]:
        return self.ranks

    def while_idle(self) -> None:
        pass

    def send_weights(
        self,
        version: int,
        group: WeightGroup,
        *,
        with_base: bool,
        checksum_dtype: str | None,
        since: int | None,
    ) -> dict[Call, str]:
        self.sent += 1
        self.since.append(since)
        self.with_base.append(with_base)
        self.checksum_dtypes.append(checksum_dtype)
        return {Call(self.script.get(self.sent, lambda: SentPart(0, 100, 2))): "rank 0"}


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(calls: list[Call], *, num_returns: int, timeout: float) -> Any:
        return [call for call in calls if call.answer is not None][:num_returns], []

    node = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(wait=wait, util=node))
    monkeypatch.setattr(weight_sync, "result_of", lambda call, name, console, _: call.answer())


def raising(error: Exception) -> Callable[[], Any]:
    def answer() -> Any:
        raise error

    return answer


def sync_of(engines: Engines, trainer: Trainer, **settings: Any) -> WeightSync:
    config = JobConfig(**{"weight_sync": "broadcast"} | settings)
    return WeightSync(config, trainer, engines, SimpleNamespace())  # type: ignore[arg-type]


def test_answers_to_the_probe_and_checksums_come_with_the_transfer_that_they_belong_to() -> None:
    answer = ProbeAnswer("", [], {"a": 7})
    engines = Engines({(1, 0): lambda: [answer], (1, 1): list})
    trainer = Trainer({1: lambda: SentPart(0, 100, 2, {"a": 7})})
    sync = sync_of(engines, trainer, rollout_dtype="bfloat16")
    engines.any_probe_due = True
    sync.send(0, wait=True)
    assert engines.probed == {0: [answer], 1: []}
    assert sync.checksums == {"a": 7}
    engines.any_probe_due = False
    sync.send(1, wait=True)
    assert trainer.checksum_dtypes == ["bfloat16", None]
    assert sync.checksums == {}


#: A response to the probe, by which the verification judges.
RESPONSE: Any = object()


@pytest.mark.parametrize("max_restarts", [0, 3])
def test_an_engine_with_a_wrong_tensor_gets_the_version_again_once_and_it_is_counted(
    max_restarts: int,
) -> None:
    right, wrong = ({"a": 7, "b": 1}, {"a": 7, "b": 2})
    answers = iter([wrong, right, wrong, wrong, right])
    engines = Engines({})
    for number in range(1, 9):
        engines.script[number, 0] = lambda: [ProbeAnswer("", [RESPONSE], next(answers))]
    trainer = Trainer({n: lambda: SentPart(0, 100, 0, right) for n in range(1, 9)})
    said: list[str] = []
    sync = sync_of(engines, trainer, rollout_dtype="bfloat16", max_restarts=max_restarts)
    sync._console = SimpleNamespace(warn=said.append)  # type: ignore[assignment]
    engines.any_probe_due = True
    sync.send(0, wait=True)
    assert engines.again == [0] and engines.versions == {0: 0, 1: 0}
    assert sync.metrics()["weight_repairs"] == 1
    assert "engine 0: 1 tensors of weight version 0" in said[0] and "first of them b" in said[0]
    # Wrong again: the engine has the version, and the verification judges what it answered.
    sync.send(1, wait=True)
    assert engines.again == [0, 0] and engines.versions == {0: 1, 1: 1}
    assert engines.probed[0][0].checksums == wrong and sync.metrics()["weight_repairs"] == 2
    sync.send(2, wait=True)
    assert engines.again == [0, 0] and trainer.sent == 5


def test_an_engine_that_is_wrong_again_and_has_no_memory_for_a_response_ends_the_job() -> None:
    engines, right, wrong = Engines({}), {"a": 7, "b": 1}, {"a": 7, "b": 2}
    for number in (1, 2):
        engines.script[number, 0] = lambda: [ProbeAnswer("", (), wrong)]
    trainer = Trainer({n: lambda: SentPart(0, 100, 0, right) for n in (1, 2)})
    sync = sync_of(engines, trainer)
    sync._console = SimpleNamespace(warn=lambda _: None)  # type: ignore[assignment]
    engines.any_probe_due = True
    with pytest.raises(FindingError, match=r"checksums of 1 tensors .* sent again: b"):
        sync.send(0, wait=True)
    assert engines.again == [0] and engines.versions[0] is None


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout_quantization": "int8"},
        {"rollout_engine": "vllm", "lora_rank": 4, "lora_sync": "adapter"},
    ],
)
def test_no_checksums_are_computed_for_engines_that_have_none(settings: dict[str, str]) -> None:
    engines, trainer = Engines({}), Trainer()
    engines.any_probe_due = True
    sync_of(engines, trainer, **settings).send(0, wait=True)
    assert trainer.checksum_dtypes == [None]


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
    with pytest.raises(TransferError, match="aborted: engine 0: died"):
        GroupStore(engines.groups[0]).barrier("joined")


def test_an_engine_that_has_the_version_does_not_get_it_twice() -> None:
    engines = Engines({(1, 0): raising(ParallelError("broken"))})
    sync_of(engines, Trainer()).send(0, wait=True)
    assert engines.replaced == [0]
    assert engines.places == [(1, 0, 0), (1, 1, 1), (2, 0, 0)]


def test_the_base_of_adapters_is_sent_once_and_again_to_an_engine_that_was_replaced() -> None:
    # version 2 is the third transfer; engine 0 is lost in it, and its successor has nothing yet
    engines, trainer = Engines({}), Trainer()
    sync = sync_of(engines, trainer, lora_rank=4, lora_sync="adapter")
    for version in (0, 1):
        sync.send(version, wait=True)
    engines.script[(1, 0)] = raising(ParallelError("broken"))
    sync.send(2, wait=True)
    sync.send(3, wait=True)
    assert engines.replaced == [0]
    assert trainer.with_base == [True, False, False, True, False]


def test_every_nth_version_is_sent_in_full_and_the_others_as_deltas() -> None:
    changes = iter([Changes(1, 100), Changes(3, 100), Changes(2, 100)])
    engines, trainer = Engines({}), Trainer()
    sync = sync_of(engines, trainer, weight_sync="delta", full_weights_every=3)
    shares = []
    for version in range(5):
        if version % 3:
            part = SentPart(0, 100, 0, changes=next(changes))
            trainer.script[version + 1] = lambda part=part: part  # type: ignore[misc]
        sync.send(version, wait=True)
        shares.append(sync.metrics().get("weight_changed_share"))
    assert trainer.since == [None, 0, 1, None, 3]
    assert shares == [None, 0.01, 0.03, None, 0.02]
    assert len(engines.groups) == 1 and engines.versions == {0: 4, 1: 4}


def test_after_a_loss_the_others_get_a_full_version_too() -> None:
    engines, trainer = Engines({}), Trainer()
    sync = sync_of(engines, trainer, weight_sync="delta")
    sync.send(0, wait=True)
    # Engine 0 dies in the delta to version 1, which engine 1 has half of.
    engines.script |= {
        (1, 0): raising(ActorLost("died")),
        (1, 1): raising(TransferError("called off")),
    }
    trainer.script[2] = raising(TransferError("called off"))
    sync.send(1, wait=True)
    assert trainer.since == [None, 0, None] and engines.versions == {0: 1, 1: 1}
    sync.send(2, wait=True)
    assert trainer.since[3:] == [1]


def test_an_engine_that_starts_between_two_versions_gets_a_full_one_and_then_deltas() -> None:
    engines, trainer = Engines({}), Trainer()
    sync = sync_of(engines, trainer, weight_sync="delta")
    for version in (0, 1):
        sync.send(version, wait=True)
    engines.replace_unless_done(0, "actor 0", "killed")
    engines.versions[0] = None
    with sync.trainer_holds_still(contextmanager(lambda: iter([None]))):
        engines.catch_up()  # type: ignore[misc]
    sync.send(2, wait=True)
    assert trainer.since == [None, 0, None, 1] and engines.versions == {0: 2, 1: 2}


def test_new_ranks_have_no_copy_that_a_delta_could_be_made_from() -> None:
    engines, trainer = Engines({}), Trainer()
    sync = sync_of(engines, trainer, weight_sync="delta")
    sync.send(0, wait=True)
    trainer.ranks = ["another rank"]
    for version in (1, 2):
        sync.send(version, wait=True)
    assert trainer.since == [None, None, 1]


def test_a_delta_that_does_not_lead_to_the_weights_is_repaired_and_is_an_error_if_it_repeats() -> (
    None
):
    engines, trainer = Engines({}), Trainer()
    said: list[str] = []
    sync = sync_of(engines, trainer, weight_sync="delta")
    sync._console = SimpleNamespace(warn=said.append)  # type: ignore[assignment]
    sync.send(0, wait=True)
    engines.script[1, 1] = raising(DeltaError("engine 1: first of them b"))
    sync.send(1, wait=True)
    # Engine 1 gets all of version 1, alone, over a group of its own.
    assert trainer.since == [None, 0, None] and engines.versions == {0: 1, 1: 1}
    assert sync.metrics()["weight_repairs"] == 1 and not engines.replaced
    assert said == ["engine 1: first of them b; it gets all of version 1"]
    with pytest.raises(TransferError, match="aborted: a delta did not lead"):
        GroupStore(engines.groups[0]).barrier("joined")
    # A delta that succeeds in between is forgiven; one after the next is not.
    sync.send(2, wait=True)
    engines.script[3, 1] = raising(DeltaError("engine 1: first of them b"))
    sync.send(3, wait=True)
    engines.script[5, 1] = raising(DeltaError("engine 1: first of them b"))
    with pytest.raises(WeightError, match="so did its last delta, although a full version"):
        sync.send(4, wait=True)


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


def test_answers_that_are_there_when_the_driver_looks_too_late_still_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_sync, "_GRACE_SECONDS", 0.0)
    engines = Engines({})
    sync_of(engines, Trainer(), step_timeout=1e-9).send(0, wait=True)
    assert not engines.replaced and engines.versions == {0: 0, 1: 0}
    assert engines.transfers == 1


def test_a_frozen_engine_is_replaced_long_before_a_transfer_has_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_calls, "SILENCE_SECONDS", 0.05)
    engines = Engines({(1, 1): None})
    engines.frozen = {"actor 1"}
    sync = sync_of(engines, Trainer(), step_timeout=1e5)
    sync.send(0, wait=True)
    assert engines.replaced == [1] and engines.versions == {0: 0, 1: 0}
    with pytest.raises(TransferError, match="aborted: engine 1 did not react"):
        GroupStore(engines.groups[0]).barrier("joined")


def test_a_slow_engine_that_reacts_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_calls, "SILENCE_SECONDS", 0.02)
    monkeypatch.setattr(weight_sync, "_GRACE_SECONDS", 0.05)
    engines = Engines({(1, 1): None})
    sync = sync_of(engines, Trainer(), step_timeout=0.3)
    sync.send(0, wait=True)
    with pytest.raises(TransferError, match="aborted: it took longer"):
        GroupStore(engines.groups[0]).barrier("joined")


def test_transfers_that_always_break_end_the_job() -> None:
    engines = Engines({(n, 0): raising(TransferError("network")) for n in range(1, 9)})
    with pytest.raises(EngineError, match="could not be sent to engines 0 in 3 attempts"):
        sync_of(engines, Trainer(), max_restarts=2).send(0, wait=True)


def test_within_devices_every_worker_gets_the_weights_from_the_rank_on_its_own() -> None:
    engines, trainer = Engines({}), Trainer()
    # Two ranks share a GPU only on CPU, where the device is the machine; the first one lends.
    trainer.devices = lambda: ["GPU-c", "GPU-b", "GPU-a", "GPU-a"]  # type: ignore[attr-defined]
    sync_of(engines, trainer, weight_sync="ipc", colocate=True).send(0, wait=True)
    [group] = engines.groups
    assert group.ipc_ranks == (2, 1, 0) and (group.senders, group.receivers) == (3, 3)
    assert engines.versions == {0: 0, 1: 0}


def test_an_engine_on_a_device_without_a_rank_is_refused_with_the_reason() -> None:
    engines, trainer = Engines({}), Trainer()
    trainer.devices = lambda: ["GPU-a", "GPU-b"]  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match="engine 1 is on GPU-c, where no trainer rank is"):
        sync_of(engines, trainer, weight_sync="ipc", colocate=True).send(0, wait=True)


def test_an_engine_replaced_while_all_generate_gets_weights_once_the_trainer_has_its_own_back() -> (
    None
):
    engines, trainer, turns = Engines({}), Trainer(), []
    trainer.devices = lambda: ["GPU-c", "GPU-b", "GPU-a"]  # type: ignore[attr-defined]
    sync = sync_of(engines, trainer, weight_sync="ipc", colocate=True)
    sync.send(0, wait=True)

    @contextmanager
    def sending() -> Any:
        assert engines.catch_up is None, "catching up must not begin again inside itself"
        engines.versions = dict.fromkeys(engines.versions)  # a sleeping engine has no version
        turns.append("sending")
        yield
        turns.append(f"generating with {engines.versions}")

    with sync.trainer_holds_still(sending):
        engines.versions[1] = None
        assert engines.catch_up is not None
        engines.catch_up()
        assert turns == ["sending", "generating with {0: 0, 1: 0}"]
        engines.catch_up()  # nobody lacks weights
        assert len(turns) == 2
    assert engines.catch_up is None
