"""The thread of an engine's actor that plays groups, and calls that have to wait for it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from plugin.cluster.engine_actor import EngineActor
from plugin.engines.protocol import GenerationRequest, SamplingParameters
from plugin.engines.weight_changes import WeightProbe
from plugin.environments.group_server import GroupServer, PlayedGroup
from plugin.errors import TransferError
from plugin.weights.buckets import pack_buckets
from plugin.weights.checksums import with_checksums
from tests.parallel.tiny_models import FAMILIES, hf_state_dict
from tests.unit.engines.tiny_engines import PARAMETERS, loaded_engine

REQUEST = GenerationRequest((1,), (1,))


class OneByOne:
    """Plays one group, which is done when `finish` is set."""

    def __init__(self) -> None:
        self.groups: list[int] = []
        self.begun, self.finish = threading.Event(), threading.Event()

    @property
    def open(self) -> int:
        return len(self.groups)

    def has_room(self, *_: Any) -> bool:
        return not self.groups

    def begin(self, group: int, *_: Any) -> None:
        self.groups.append(group)
        self.begun.set()

    def step(self) -> list[PlayedGroup]:
        if not self.finish.wait(0.01):
            return []
        return [(self.groups.pop(), [])]

    def abort(self) -> None:
        self.groups.clear()


def test_who_holds_the_server_waits_for_what_is_under_way_and_lets_nothing_begin() -> None:
    player = OneByOne()
    server = GroupServer(player).start()
    server.submit({0: REQUEST, 1: REQUEST}, SamplingParameters(), -1)
    assert player.begun.wait(10)
    holder = threading.Thread(target=server.hold)
    holder.start()
    holder.join(0.1)
    assert holder.is_alive() and player.open == 1  # an engine would sleep only now
    player.finish.set()
    holder.join(10)
    assert not holder.is_alive()
    assert [group for group, _ in server.collect(0)] == [0]
    assert player.open == 0
    with server.changing(5, last=True, interrupts=False):
        assert player.open == 0
    assert [group for group, _ in server.collect(0)] == [1]


def test_a_pause_lets_groups_begin_again() -> None:
    player = OneByOne()
    server = GroupServer(player).start()
    player.finish.set()
    with server.held():
        server.submit({0: REQUEST}, SamplingParameters(), -1)
        assert not player.begun.wait(0.1)
    assert [group for group, _ in server.collect(0)] == [0]


@pytest.mark.parametrize("interrupts", [False, True])
def test_an_engine_answers_the_probe_with_new_weights_before_any_group_begins(
    interrupts: bool,
) -> None:
    """Also where new weights may interrupt responses: then those under way end first."""
    player, engine = OneByOne(), loaded_engine(interrupts="recompute" if interrupts else None)
    actor: Any = object.__new__(EngineActor)
    actor._server, actor._engine = GroupServer(player).start(), engine
    actor._reads_views, actor._interrupts = True, interrupts
    actor._server.submit({0: REQUEST, 1: REQUEST}, SamplingParameters(), -1)
    assert player.begun.wait(10)
    [bucket] = pack_buckets(hf_state_dict(FAMILIES["qwen3"](), 1).items())
    probe = WeightProbe(GenerationRequest((5, 6), (1, 2)), PARAMETERS, checksums=True)
    generate, under_way = engine.generate, []

    def watched(*asked: Any) -> Any:
        under_way.append(player.open)
        return generate(*asked)

    engine.generate = watched  # type: ignore[method-assign]
    threading.Timer(0.2, player.finish.set).start()
    [answer] = actor.load_weights(1, np.frombuffer(bucket, np.uint8), True, probe)
    assert all((one.token_versions() == 1).all() for one in answer.answers)
    assert answer.checksums == engine.weight_checksums()
    done = [*actor._server.collect(0), *([] if player.open == 0 else actor._server.collect(0))]
    assert under_way == [0] and {group for group, _ in done} <= {0, 1}
    assert actor.load_weights(2, np.frombuffer(bucket, np.uint8), True) == []
    [again] = actor.answer_probe(probe)
    assert all((one.token_versions() == 2).all() for one in again.answers)


def test_no_group_begins_with_checksums_that_are_not_the_trainers() -> None:
    player, engine = OneByOne(), loaded_engine()
    actor: Any = object.__new__(EngineActor)
    actor._server, actor._engine = GroupServer(player).start(), engine
    actor._reads_views, actor._interrupts = True, False
    state = hf_state_dict(FAMILIES["qwen3"](), 1)
    sums: dict[str, int] = {}
    list(with_checksums(state.items(), torch.float32, sums))
    name = "model.layers.1.mlp.up_proj.weight"
    [right] = pack_buckets(state.items())
    [damaged] = pack_buckets((state | {name: state[name] + 1e-6}).items())
    probe = WeightProbe(None, PARAMETERS, checksums=True)
    with pytest.raises(TransferError, match=f"1 tensors of weight version 1 .* {name}"):
        actor.load_weights(1, np.frombuffer(damaged, np.uint8), True, probe, sums)
    actor._server.submit({0: REQUEST}, SamplingParameters(), -1)
    assert not player.begun.wait(0.1)
    again = actor.load_weights(1, np.frombuffer(right, np.uint8), True, probe, None, True)
    assert [answer.checksums for answer in again] == [engine.weight_checksums()]
    assert player.begun.wait(10)
    player.finish.set()


def test_no_group_begins_before_the_driver_has_compared_checksums() -> None:
    player, engine = OneByOne(), loaded_engine()
    actor: Any = object.__new__(EngineActor)
    actor._server, actor._engine = GroupServer(player).start(), engine
    actor._reads_views, actor._interrupts = True, False
    [bucket] = pack_buckets(hf_state_dict(FAMILIES["qwen3"](), 1).items())
    # Weights from ranks, without the ranks.
    engine.receive_weights = lambda version, *_: engine.load_weights(  # type: ignore[method-assign]
        version, bucket, last=True
    )
    probe = WeightProbe(None, PARAMETERS, checksums=True)
    actor._server.submit({0: REQUEST}, SamplingParameters(), -1)
    assert player.begun.wait(10)
    player.finish.set()
    for again in (False, True):
        [answer] = actor.receive_weights(1, "group", 0, probe, again)
        assert answer.checksums
    player.begun.clear()
    actor._server.submit({1: REQUEST}, SamplingParameters(), -1)
    assert not player.begun.wait(0.1)
    actor.accept_weights(1)
    assert player.begun.wait(10)
    # Without checksums there is nothing to wait for.
    player.begun.clear()
    assert actor.receive_weights(2, "group", 0) == []
    actor._server.submit({2: REQUEST}, SamplingParameters(), 2)
    assert player.begun.wait(10)


def test_a_canceled_group_holds_nobody_up() -> None:
    player = OneByOne()
    server = GroupServer(player).start()
    server.submit({0: REQUEST}, SamplingParameters(), -1)
    server.cancel(1)
    server.hold()
    assert player.open == 0 and server.collect(0) == []


def test_a_call_that_overtakes_the_cancellation_before_it_gets_nothing_of_the_canceled_groups() -> (
    None
):
    player, found = OneByOne(), list[Any]()
    server = GroupServer(player).start()
    player.finish.set()
    server.submit({0: REQUEST}, SamplingParameters(), -1)
    with server.held():  # group 0 is done
        collects = threading.Thread(target=lambda: found.append(server.collect(1)))
        collects.start()
        collects.join(0.2)
        server.cancel(1)
    server.submit({7: REQUEST}, SamplingParameters(), -1)
    collects.join(10)
    assert [[group for group, _ in done] for done in found] == [[7]]
