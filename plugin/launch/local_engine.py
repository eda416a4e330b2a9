"""One engine in this process, for a queue: what `EnginePool` is for engines in actors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from torch import Tensor

from plugin.errors import EngineError
from plugin.megatron_backend.model.weight_files import HfDirectory
from plugin.rollout.conversation.trajectory import Rollouts, Trajectory
from plugin.rollout.engines.protocol import GenerationRequest, RolloutEngine, SamplingParameters
from plugin.rollout.engines.weight_buckets import pack_buckets

Play = Callable[
    [RolloutEngine, Sequence[GenerationRequest], SamplingParameters], list[list[Trajectory]]
]


class LocalEngine:
    """Answers a request when somebody waits for it.

    play: how requests become trajectories, in one turn or in several
    """

    def __init__(self, engine: RolloutEngine, play: Play) -> None:
        self._engine, self._play = engine, play
        self._asked: dict[int, tuple[list[GenerationRequest], SamplingParameters]] = {}
        self._tickets = 0

    def __len__(self) -> int:
        return 1

    def available(self) -> list[int]:
        """The one engine."""
        return [0]

    def send(
        self, engine: int, requests: list[GenerationRequest], parameters: SamplingParameters
    ) -> int:
        """A ticket for the answer."""
        self._tickets += 1
        self._asked[self._tickets] = requests, parameters
        return self._tickets

    def finished(self, tickets: list[int], *, wait_seconds: float) -> list[int]:
        """The oldest ticket; its answer is generated when it is asked for."""
        return sorted(tickets)[:1]

    def answer(self, ticket: int) -> Rollouts:
        """Generate the answer of a ticket."""
        requests, parameters = self._asked.pop(ticket)
        return Rollouts.of(self._play(self._engine, requests, parameters))

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
