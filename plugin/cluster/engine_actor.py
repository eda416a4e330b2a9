"""The body of an engine's actor: one thread generates, and calls talk to it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from plugin.batch_types import with_checked_routes
from plugin.cluster.array_transport import Arrays, apart
from plugin.cluster.environment_actor import RemoteEnvironments
from plugin.cluster.interfaces import set_network
from plugin.cluster.remote_calls import ReportingActor
from plugin.config import JobConfig
from plugin.engines.choice import make_engine
from plugin.engines.expert_routes import RouteShape
from plugin.engines.protocol import BroadcastEngine, EnginePart, SleepingEngine
from plugin.engines.response_stream import ResponseStream
from plugin.engines.weight_changes import ProbeAnswer, WeightProbe, answer_probe, require_equal
from plugin.environments.group_server import GroupServer
from plugin.environments.multi_turn import choose_player
from plugin.environments.trajectory import Rollouts
from plugin.errors import BatchError, ConfigError
from plugin.tasks.protocol import FIRST_HELD_OUT
from plugin.weights.checksums import Checksums
from plugin.weights.group import WeightGroup

#: Ray's concurrency groups: a thread each for loading weights and for waiting for groups.
WEIGHTS, ANSWERS = "weights", "answers"

#: Where the pool names to vLLM the bundles of an engine that is larger than a node.
BUNDLES = "VLLM_RAY_BUNDLE_INDICES"


def answer_parts(config: JobConfig) -> int:
    """In how many objects the bulk of an engine's answer is.

    Routes are the heaviest by far: an object for each response of a group, so that nobody fetches
    those of another. Without them a group is fetched as a whole.
    """
    return config.n_samples_per_prompt if config.wants_rollout_routes else 1


class EngineActor(ReportingActor):
    """Runs any engine and returns its answers as flat arrays.

    New weights wait until no response is under way, and hold back the groups that come next; with
    --partial-rollouts the engine lets them in between two tokens.
    """

    def __init__(
        self,
        config: JobConfig,
        hf_config: Mapping[str, Any],
        name: str,
        environment: Mapping[str, str],
    ) -> None:
        super().__init__()
        os.environ.update(environment)  # before anything looks for GPUs
        if config.network_interface is not None or BUNDLES not in environment:
            # vLLM would hand the names on to workers of nodes where they may be others.
            import ray

            address = ray.util.get_node_ip_address()
            set_network(config, address, gloo_stays_here=config.address is None)
        self.use_threads(config, "engine", hf_config)
        self._reads_views = config.engine_traits.reads_views
        self._interrupts = config.interrupts_responses
        self._replays, self._parts = config.use_rollout_routing_replay, answer_parts(config)
        shape = RouteShape.of(hf_config)
        self._route_shape = len(shape.layers), shape.topk, shape.experts
        self._engine = make_engine(config, hf_config, name)
        if config.colocate and not hasattr(self._engine, "sleep"):
            raise ConfigError(
                f"--colocate: the engine of --rollout-engine {config.rollout_engine} cannot give "
                "its memory to the trainer; give it sleep(level) and wake(part), or drop --colocate"
            )
        self._stream = ResponseStream(self._engine, config.rollout_max_batch)
        player = choose_player(config, partial(RemoteEnvironments, config))
        self._server = GroupServer(player(self._stream)).start()
        self.health = self._engine.health
        self.submit, self.cancel = self._server.submit, self._server.cancel

    def ping(self) -> int:
        """Answer at once how far the engine is, see `ResponseStream.progress`."""
        return self._stream.progress

    def collect(self, era: int) -> tuple[Arrays, list[Arrays]]:
        """Wait for groups: the `Rollouts` of those that are done, one trajectory per seed.

        As head and parts, see `apart`. Routes are checked here: the driver never sees them.
        """
        done = self._server.collect(era)
        rollouts = Rollouts.of([t for _, t in done], [group for group, _ in done])
        # An evaluation asks for no routes.
        if self._replays and any(group < FIRST_HELD_OUT for group, _ in done):
            try:
                batch = with_checked_routes(rollouts.batch, self._route_shape)
            except BatchError as error:
                prompts = ", ".join(str(group) for group, _ in done)
                raise BatchError(f"in the answers to the prompts {prompts}: {error}") from error
            rollouts = replace(rollouts, batch=batch)
        return apart(rollouts, self._parts)

    def load_weights(
        self,
        version: int,
        bucket: np.ndarray,
        last: bool,
        probe: WeightProbe | None = None,
        expected: Checksums | None = None,
        again: bool = False,
    ) -> list[ProbeAnswer]:
        """As `RolloutEngine.load_weights`, without a copy where the engine reads views.

        probe: answered with the new weights, before any group begins
        expected: the trainer's checksums; a `TransferError` if the engine reports others, after
            which no group begins until it has got the version again
        again: the first bucket of a version that comes once more, because it was not right
        """
        given: Any = bucket if self._reads_views else bucket.tobytes()
        with self._changing(version, probe, last=last):
            if again:
                cast(Any, self._engine).forget_weights()
            self._engine.load_weights(version, given, last=last)
            answers = [] if probe is None else answer_probe(self._engine, probe)
            require_equal(answers, expected or {}, version)
            return answers

    def _changing(
        self, version: int, probe: WeightProbe | None, *, last: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Let no response run; with a probe not even one that new weights could interrupt."""
        interrupts = self._interrupts and probe is None
        return self._server.changing(version, last=last, interrupts=interrupts)

    def weight_receivers(self) -> int:
        """How many of the engine's workers receive weights."""
        return cast(BroadcastEngine, self._engine).weight_receivers()

    def weight_devices(self) -> list[str]:
        """The devices of those workers."""
        return cast(BroadcastEngine, self._engine).weight_devices()

    def receive_weights(
        self,
        version: int,
        group: WeightGroup,
        first: int,
        probe: WeightProbe | None = None,
        again: bool = False,
    ) -> list[ProbeAnswer]:
        """As `BroadcastEngine.receive_weights`; after an error no group begins until it has one.

        probe: as in `load_weights`; where checksums are reported, no group begins before
            `accept_weights`
        again: the version comes once more, because it was not right
        """
        with self._changing(version, probe, last=False):
            if again:
                cast(Any, self._engine).forget_weights()
            cast(BroadcastEngine, self._engine).receive_weights(version, group, first)
            answers = [] if probe is None else answer_probe(self._engine, probe)
        if not any(answer.checksums for answer in answers):
            self.accept_weights(version)
        return answers

    def accept_weights(self, version: int) -> None:
        """Let groups begin with weights whose checksums the driver has compared."""
        with self._server.changing(version, last=True, interrupts=True):
            pass

    def answer_probe(self, probe: WeightProbe) -> list[ProbeAnswer]:
        """Answer with the weights that the engine has, once no response is under way."""
        with self._server.held():
            return answer_probe(self._engine, probe)

    def awaits_probe(self) -> bool:
        """As `HttpEngine.awaits_probe`."""
        return bool(cast(Any, self._engine).awaits_probe())

    def sleep(self, level: int) -> None:
        """As `SleepingEngine.sleep`, once no response is under way; none begins without weights."""
        self._server.hold()
        cast(SleepingEngine, self._engine).sleep(level)

    def wake(self, part: EnginePart) -> None:
        """As `SleepingEngine.wake`."""
        cast(SleepingEngine, self._engine).wake(part)
