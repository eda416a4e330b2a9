"""Rollout engines as Ray actors, and the driver's handle on all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plugin.config import JobConfig
from plugin.errors import EngineError
from plugin.launch.array_transport import (
    Arrays,
    trajectories_from_arrays,
    trajectories_to_arrays,
)
from plugin.launch.placement import Reservation, ResourcePlan
from plugin.launch.remote_calls import result_of, wait_for_all
from plugin.rollout.engine_choice import make_engine
from plugin.rollout.engine_protocol import (
    EngineHealth,
    GenerationRequest,
    SamplingParameters,
)
from plugin.rollout.single_turn import run_single_turn
from plugin.rollout.trajectory import Trajectory


class EngineActor:
    """The body of an engine's actor: any engine, with answers as flat arrays."""

    def __init__(self, config: JobConfig, hf_config: Mapping[str, Any], name: str) -> None:
        import torch

        if not torch.cuda.is_available():
            torch.set_num_threads(config.threads_per_rank)
        self._engine = make_engine(config, hf_config, name)

    def generate(
        self, requests: Sequence[GenerationRequest], parameters: SamplingParameters
    ) -> Arrays:
        """One trajectory per seed of every request."""
        return trajectories_to_arrays(run_single_turn(self._engine, requests, parameters))

    def load_weights(self, version: int, bucket: bytes, last: bool) -> None:
        """As `RolloutEngine.load_weights`."""
        self._engine.load_weights(version, bucket, last=last)

    def health(self) -> EngineHealth:
        """As `RolloutEngine.health`."""
        return self._engine.health()


class EnginePool:
    """Starts the engines; sends requests and weights, which each engine serves in the order of sending."""

    def __init__(
        self,
        config: JobConfig,
        hf_config: Mapping[str, Any],
        plan: ResourcePlan,
        reservation: Reservation,
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._config = config
        actor: Any = ray.remote(EngineActor)
        self.actors: list[Any] = []
        for number in range(config.num_rollout_engines):
            group, bundle = reservation.engines, number
            if group is None:
                nodes = reservation.trainer_nodes
                group, bundle = reservation.trainer, nodes[number % len(nodes)]
            place = PlacementGroupSchedulingStrategy(group, bundle)
            options = actor.options(
                num_cpus=plan.engine["CPU"],
                num_gpus=plan.engine.get("GPU", 0),
                scheduling_strategy=place,
            )
            self.actors.append(options.remote(config, hf_config, f"engine {number}"))
        self._loads: dict[Any, str] = {}
        self._asked: dict[Any, str] = {}

    def __len__(self) -> int:
        return len(self.actors)

    def wait_until_ready(self) -> list[EngineHealth]:
        """Every engine's first sign of life."""
        calls = [actor.health.remote() for actor in self.actors]
        return wait_for_all(calls, self._names(), timeout=self._config.start_timeout)

    def send(
        self, engine: int, requests: Sequence[GenerationRequest], parameters: SamplingParameters
    ) -> Any:
        """A ticket for the answer of engine number `engine`."""
        ticket = self.actors[engine].generate.remote(list(requests), parameters)
        self._asked[ticket] = f"engine {engine}"
        return ticket

    def finished(self, tickets: list[Any], *, wait_seconds: float) -> list[Any]:
        """The tickets that have an answer, or have failed; waits for the first one at most so long."""
        import ray

        self.check_loads()
        wanted = 1 if wait_seconds else len(tickets)
        return ray.wait(tickets, num_returns=wanted, timeout=wait_seconds)[0]

    def answer(self, ticket: Any) -> list[list[Trajectory]]:
        """The answer of a finished ticket, or its error."""
        return trajectories_from_arrays(result_of(ticket, self._asked.pop(ticket)))

    def send_weights(self, version: int, buckets: Sequence[Any]) -> None:
        """Queues new weights behind what each engine is doing; `finish_loads` waits for them."""
        self.check_loads()
        for name, actor in zip(self._names(), self.actors, strict=True):
            for number, bucket in enumerate(buckets):
                last = number == len(buckets) - 1
                self._loads[actor.load_weights.remote(version, bucket, last)] = name

    def check_loads(self) -> None:
        """Raises the error of a load that has failed; does not wait."""
        import ray

        if not self._loads:
            return
        done, _ = ray.wait(list(self._loads), num_returns=len(self._loads), timeout=0)
        for reference in done:
            result_of(reference, self._loads.pop(reference))

    def finish_loads(self) -> None:
        """Waits until every engine has the weights sent last."""
        references, names = list(self._loads), list(self._loads.values())
        wait_for_all(references, names, timeout=self._config.step_timeout)
        self._loads.clear()

    def require_version(self, version: int) -> None:
        """An `EngineError` unless every engine generates with `version`."""
        for health in self.wait_until_ready():
            if health.weight_version != version:
                raise EngineError(
                    f"{health.name} has weight version {health.weight_version}, expected {version}"
                )

    def close(self) -> None:
        """Ends the actors."""
        import ray

        for actor in self.actors:
            ray.kill(actor)

    def _names(self) -> list[str]:
        return [f"engine {number}" for number in range(len(self.actors))]
