"""The body of an engine's actor: one thread generates, and calls talk to it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from plugin.cluster.array_transport import Arrays, rollouts_to_arrays
from plugin.cluster.remote_calls import ReportingActor
from plugin.config import JobConfig
from plugin.engines.choice import make_engine
from plugin.engines.protocol import (
    BroadcastEngine,
    GenerationRequest,
    SamplingParameters,
)
from plugin.engines.response_stream import ResponseStream
from plugin.engines.sleep import EnginePart, SleepingEngine
from plugin.engines.weight_changes import ProbeAnswer, WeightProbe, answer_probe
from plugin.environments.group_loop import GroupLoop, PlayedGroup
from plugin.environments.multi_turn import choose_player
from plugin.environments.trajectory import Rollouts
from plugin.errors import ConfigError
from plugin.weights.group import WeightGroup

#: Ray's concurrency groups: a thread each for loading weights and for waiting for groups.
WEIGHTS, ANSWERS = "weights", "answers"
#: Groups that are done within so many seconds travel together: a call costs milliseconds.
_GATHER_SECONDS = 0.05


class EngineActor(ReportingActor):
    """Any engine, with answers as flat arrays.

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
        self.use_threads(config, "engine", hf_config)
        self._reads_views = config.engine_traits.reads_views
        self._interrupts = config.partial_rollouts
        self._engine = make_engine(config, hf_config, name)
        if config.colocate and not hasattr(self._engine, "sleep"):
            raise ConfigError(
                f"--colocate: the engine of --rollout-engine {config.rollout_engine} cannot give "
                "its memory to the trainer; give it sleep(level) and wake(part), or drop --colocate"
            )
        stream = ResponseStream(self._engine, config.rollout_max_batch)
        self._server = GroupServer(GroupLoop(choose_player(config)(stream)))
        self.health = self._engine.health
        self.submit, self.cancel = self._server.submit, self._server.cancel

    def ping(self) -> None:
        """Answer: the process is alive."""

    def collect(self, era: int) -> tuple[list[int], Arrays]:
        """Wait for groups: their tickets, and one trajectory per seed of each."""
        done = self._server.collect(era)
        rollouts = Rollouts.of([group.trajectories for group in done])
        return [group.ticket for group in done], rollouts_to_arrays(rollouts)

    def load_weights(
        self, version: int, bucket: np.ndarray, last: bool, probe: WeightProbe | None = None
    ) -> list[ProbeAnswer]:
        """As `RolloutEngine.load_weights`, from the object store's own memory where it can be.

        probe: answered with the new weights, before any group begins
        """
        given: Any = bucket if self._reads_views else bucket.tobytes()
        with self._changing(version, probe, last=last):
            self._engine.load_weights(version, given, last=last)
            return [] if probe is None else answer_probe(self._engine, probe)

    def _changing(
        self, version: int, probe: WeightProbe | None, *, last: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Keep responses away; for a probe also those that new weights could interrupt."""
        interrupts = self._interrupts and probe is None
        return self._server.changing(version, last=last, interrupts=interrupts)

    def weight_receivers(self) -> int:
        """How many of the engine's workers receive weights."""
        return cast(BroadcastEngine, self._engine).weight_receivers()

    def weight_devices(self) -> list[str]:
        """The devices of those workers."""
        return cast(BroadcastEngine, self._engine).weight_devices()

    def receive_weights(
        self, version: int, group: WeightGroup, first: int, probe: WeightProbe | None = None
    ) -> list[ProbeAnswer]:
        """As `BroadcastEngine.receive_weights`; after an error no group begins until it has one.

        probe: as in `load_weights`
        """
        with self._changing(version, probe, last=True):
            cast(BroadcastEngine, self._engine).receive_weights(version, group, first)
            return [] if probe is None else answer_probe(self._engine, probe)

    def answer_probe(self, probe: WeightProbe) -> list[ProbeAnswer]:
        """Answer with the weights that the engine has, once no response is under way."""
        with self._server.held():
            return answer_probe(self._engine, probe)

    def sleep(self, level: int) -> None:
        """As `SleepingEngine.sleep`, once no response is under way; none begins without weights."""
        self._server.hold()
        cast(SleepingEngine, self._engine).sleep(level)

    def wake(self, part: EnginePart) -> None:
        """As `SleepingEngine.wake`."""
        cast(SleepingEngine, self._engine).wake(part)


class GroupServer:
    """Plays groups in a thread of its own, until the process ends; calls come from other threads.

    Only that thread touches the loop, which others hold or find idle under the lock.
    """

    def __init__(self, loop: GroupLoop) -> None:
        self._loop = loop
        self._turn = threading.Condition()
        self._inbox: list[tuple[Any, ...]] = []
        self._done: list[PlayedGroup] = []
        self._stepping, self._abort = False, False
        self._era = 0
        self._failure: BaseException | None = None
        threading.Thread(target=self._play, daemon=True).start()

    def submit(
        self,
        tickets: Sequence[int],
        requests: Sequence[GenerationRequest],
        parameters: SamplingParameters,
        at_least: int,
    ) -> None:
        """Take groups; see `GroupLoop.add`."""
        with self._turn:
            self._inbox.append((tickets, requests, parameters, at_least))
            self._turn.notify_all()

    def collect(self, era: int) -> list[PlayedGroup]:
        """The groups that are done, once there are some; none if a later era has begun.

        Raises what ended the generation.
        """
        with self._turn:

            def over() -> bool:
                return self._failure is not None or self._era > era

            self._turn.wait_for(lambda: bool(self._done) or over())
            self._turn.wait_for(lambda: self._is_idle() or over(), timeout=_GATHER_SECONDS)
            self._require_alive()
            if self._era > era:
                return []
            done, self._done = self._done, []
            return done

    def cancel(self, era: int) -> None:
        """Forget every group, also those that are done; what comes next is of `era`."""
        with self._turn:
            self._inbox.clear()
            self._done.clear()
            self._era = era
            self._abort = True
            self._turn.notify_all()

    @contextlib.contextmanager
    def changing(self, version: int, *, last: bool, interrupts: bool) -> Iterator[None]:
        """Keep responses away from weights that change, from the first part of them to the last.

        interrupts: the engine does so itself, between two tokens
        """
        if not interrupts:
            self.hold()
        yield
        if last:
            with self._turn:
                self._loop.version, self._loop.held = version, False
                self._turn.notify_all()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep responses away for a while."""
        self.hold()
        yield
        with self._turn:
            self._loop.held = False
            self._turn.notify_all()

    def hold(self) -> None:
        """Begin no further group, and wait until none is under way."""
        with self._turn:
            self._loop.held = True
            self._turn.wait_for(lambda: self._failure is not None or not self._is_playing())
            self._require_alive()

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _is_playing(self) -> bool:
        return self._stepping or self._loop.open > 0

    def _is_idle(self) -> bool:
        return not (self._stepping or self._inbox) and self._loop.is_idle

    def _play(self) -> None:
        # OpenMP counts threads for each of ours; torch sets the number only at its first operation
        # here, and vLLM plans its attention before that.
        torch.set_num_threads(torch.get_num_threads())
        try:
            while True:
                with self._turn:
                    self._turn.wait_for(self._has_work)
                    era = self._era
                    self._stepping = True
                    self._take_mail()
                done = self._loop.step()
                with self._turn:
                    self._stepping = False
                    if self._era == era:
                        self._done += done
                    self._turn.notify_all()
        except BaseException as error:
            with self._turn:
                self._failure, self._stepping = error, False
                self._turn.notify_all()

    def _has_work(self) -> bool:
        return self._abort or bool(self._inbox) or self._loop.can_step

    def _take_mail(self) -> None:
        if self._abort:
            self._loop.abort()
            self._abort = False
        for groups in self._inbox:
            self._loop.add(*groups)
        self._inbox.clear()
