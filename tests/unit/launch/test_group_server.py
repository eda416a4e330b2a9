"""The thread of an engine's actor that plays groups, and calls that have to wait for it."""

from __future__ import annotations

import threading
from typing import Any

from plugin.launch.engine_actor import GroupServer
from plugin.rollout.conversation.group_loop import GroupLoop, PlayedGroup
from plugin.rollout.engines.protocol import GenerationRequest, SamplingParameters

REQUEST = GenerationRequest((1,), (1,))


class OneByOne:
    """Plays one group, which is done when `finish` is set."""

    def __init__(self) -> None:
        self.tickets: list[int] = []
        self.begun, self.finish = threading.Event(), threading.Event()

    @property
    def open(self) -> int:
        return len(self.tickets)

    def has_room(self, *_: Any) -> bool:
        return not self.tickets

    def begin(self, ticket: int, *_: Any) -> None:
        self.tickets.append(ticket)
        self.begun.set()

    def step(self) -> list[PlayedGroup]:
        if not self.finish.wait(0.01):
            return []
        return [PlayedGroup(self.tickets.pop(), [])]

    def abort(self) -> None:
        self.tickets.clear()


def test_who_holds_the_server_waits_for_what_is_under_way_and_lets_nothing_begin() -> None:
    player = OneByOne()
    server = GroupServer(GroupLoop(player))
    server.submit([0, 1], [REQUEST, REQUEST], SamplingParameters(), -1)
    assert player.begun.wait(10)
    holder = threading.Thread(target=server.hold)
    holder.start()
    holder.join(0.1)
    assert holder.is_alive() and player.open == 1  # an engine would sleep only now
    player.finish.set()
    holder.join(10)
    assert not holder.is_alive()
    assert [group.ticket for group in server.collect(0)] == [0]
    assert player.open == 0
    with server.changing(5, last=True, interrupts=False):
        assert player.open == 0
    assert [group.ticket for group in server.collect(0)] == [1]


def test_a_canceled_group_holds_nobody_up() -> None:
    player = OneByOne()
    server = GroupServer(GroupLoop(player))
    server.submit([0], [REQUEST], SamplingParameters(), -1)
    server.cancel(1)
    server.hold()
    assert player.open == 0 and server.collect(0) == []
