"""A reward server that dies, stalls, redirects, talks nonsense or sends without end: one line, in time."""

from __future__ import annotations

import tracemalloc

import pytest

from plugin.errors import EngineError
from plugin.rewards.reward_set import RewardInput
from tests.hostile_server import ATTACKS, Attack, hostile, redirects
from tests.unit.rewards.test_built_in_rewards import rewards

pytestmark = pytest.mark.usefixtures("jumping_clock")

SECONDS = 1.0


@pytest.mark.timeout(60)  # of a hang
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_server_costs_bounded_time_and_memory_and_is_named(attack: Attack) -> None:
    with hostile(attack) as server:
        reward = rewards("http", url=server.url, timeout=SECONDS)
        tracemalloc.start()
        try:
            with pytest.raises(EngineError, match=f"--reward-url {server.url}") as caught:
                reward.score(RewardInput("seven", {"answer": "7"}, prompt="3+4"))
            memory = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert memory < 32 << 20
        assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 1000
        assert server.connections <= 3


def test_prompts_do_not_follow_a_redirect() -> None:
    with hostile(redirects) as server:
        reward = rewards("http", url=server.url, timeout=SECONDS)
        with pytest.raises(EngineError, match="HTTP 302"):
            reward.score(RewardInput("seven", {"answer": "7"}, prompt="3+4"))
        assert server.connections == 1


@pytest.mark.parametrize("digits", [400, 5000])
def test_an_answer_of_many_digits_is_no_number(digits: int) -> None:
    def answers(connection, over) -> None:  # type: ignore[no-untyped-def]
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {digits}\r\n\r\n"
        connection.sendall(head.encode() + b"9" * digits)

    with hostile(answers) as server:
        reward = rewards("http", url=server.url, timeout=SECONDS)
        with pytest.raises(EngineError, match=r"answer a number|4300 digits"):
            reward.score(RewardInput("seven", {"answer": "7"}, prompt="3+4"))
