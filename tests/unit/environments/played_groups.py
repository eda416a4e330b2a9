"""Groups played to their end in this process, without a queue or Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plugin.config import JobConfig
from plugin.engines.protocol import GenerationRequest, RolloutEngine, SamplingParameters
from plugin.engines.response_stream import ResponseStream
from plugin.environments.environment_protocol import MultiTurnTask
from plugin.environments.group_server import GroupServer, Player, SingleTurnPlayer
from plugin.environments.multi_turn import MultiTurnPlayer
from plugin.environments.trajectory import Trajectory


def play_all(
    player: Player, requests: Sequence[GenerationRequest], parameters: SamplingParameters
) -> list[list[Trajectory]]:
    """The trajectories of every request, in order, once all are done."""
    server, done = GroupServer(player), dict[int, list[Trajectory]]()
    server.submit(dict(enumerate(requests)), parameters)
    try:
        while len(server):
            done.update(server.step())
    except BaseException:
        player.abort()
        raise
    return [done[number] for number in range(len(requests))]


def run_single_turn(
    engine: RolloutEngine, requests: Sequence[GenerationRequest], parameters: SamplingParameters
) -> list[list[Trajectory]]:
    """For each request, one trajectory per seed; a failed generation is a failed trajectory."""
    most = sum(len(request.seeds) for request in requests)
    return play_all(SingleTurnPlayer(ResponseStream(engine, most)), requests, parameters)


def run_multi_turn(
    engine: RolloutEngine,
    requests: Sequence[GenerationRequest],
    parameters: SamplingParameters,
    *,
    task: MultiTurnTask,
    tokenizer: Any,
    config: JobConfig,
) -> list[list[Trajectory]]:
    """For each request, one trajectory per seed; returns when every environment is closed."""
    most = sum(len(request.seeds) for request in requests)
    stream = ResponseStream(engine, most)
    player = MultiTurnPlayer(stream, task=task, tokenizer=tokenizer, config=config)
    try:
        return play_all(player, requests, parameters)
    finally:
        while player._calls.open:
            player._collect(0.05)
