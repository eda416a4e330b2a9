"""One engine in this process, for a queue: what `EnginePool` is for engines in actors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from plugin.controller.queue.groups_in_flight import Arrival
from plugin.engines.protocol import GenerationRequest, RolloutEngine, SamplingParameters
from plugin.environments.group_loop import GroupLoop, Player
from plugin.environments.trajectory import Rollouts
from plugin.errors import EngineError
from plugin.megatron_backend.hf_weights.files import HfDirectory
from plugin.weights.buckets import pack_buckets


class LocalEngine:
    """Generates when somebody waits for it."""

    def __init__(self, player: Player) -> None:
        self._loop = GroupLoop(player)
        self._tickets = itertools.count()

    def __len__(self) -> int:
        return 1

    def available(self) -> list[int]:
        """The one engine."""
        return [0]

    def send(
        self, engine: int, requests: list[GenerationRequest], parameters: SamplingParameters
    ) -> list[int]:
        """Tickets of the groups."""
        tickets = [next(self._tickets) for _ in requests]
        self._loop.add(tickets, requests, parameters)
        return tickets

    def receive(self, *, wait_seconds: float) -> list[Arrival]:
        """The next groups that are done; generates until there are some."""
        while not self._loop.is_idle:
            done = self._loop.step()
            if done:
                rollouts = Rollouts.of([group.trajectories for group in done])
                return [Arrival([group.ticket for group in done], rollouts)]
        return []

    def replace(self, engine: int, reason: str) -> None:
        """Refuse: there is no process to replace."""
        raise EngineError(f"the engine {reason}; raise --rollout-timeout")


def load_directory(engine: RolloutEngine, directory: Path) -> None:
    """Load the weights of a Hugging Face directory as version 0."""
    load_tensors(engine, HfDirectory(directory).items())


def load_tensors(engine: RolloutEngine, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Load weights by their Hugging Face names as version 0, bucket by bucket."""
    buckets = pack_buckets(named_tensors)
    held = next(buckets)
    for bucket in buckets:
        engine.load_weights(0, held, last=False)
        held = bucket
    engine.load_weights(0, held, last=True)
