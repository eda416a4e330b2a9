"""One engine in this process, for a queue: what `EnginePool` is for engines in actors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from plugin.config import JobConfig
from plugin.engines.protocol import GenerationRequest, RolloutEngine, SamplingParameters
from plugin.engines.response_stream import ResponseStream
from plugin.environments.group_server import GroupServer
from plugin.environments.multi_turn import choose_player
from plugin.environments.trajectory import Rollouts
from plugin.megatron_backend.hf_weights.files import HfDirectory
from plugin.weights.buckets import pack_buckets


class LocalEngine:
    """Generates inside `receive`."""

    def __init__(self, engine: RolloutEngine, config: JobConfig) -> None:
        stream = ResponseStream(engine, config.rollout_max_batch)
        self._player = choose_player(config)(stream)
        self._server = GroupServer(self._player)

    def __len__(self) -> int:
        return 1

    def least_loaded(self) -> tuple[int, int]:
        """The one engine, and how many groups it has."""
        return 0, len(self._server)

    def send(
        self, engine: int, requests: Mapping[int, GenerationRequest], parameters: SamplingParameters
    ) -> None:
        """Have the engine generate groups, by their numbers."""
        self._server.submit(requests, parameters)

    def cancel_groups(self) -> None:
        """Drop the groups that the engine has."""
        self._server.cancel(0)
        self._player.abort()

    def receive(self, *, wait_seconds: float) -> tuple[list[Rollouts], list[int]]:
        """The next groups that are done; generates until there are some, and loses none."""
        done: list[Rollouts] = []
        while len(self._server) and not done:
            played = self._server.step()
            if played:
                done.append(Rollouts.of([t for _, t in played], [group for group, _ in played]))
        return done, []


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
