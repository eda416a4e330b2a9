"""Rollout engines as Ray actors, and the driver's handle on all of them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from plugin.config import JobConfig
from plugin.errors import (
    ActorLost,
    ClusterError,
    ConfigError,
    EngineError,
    ParallelError,
    SenderLost,
    TransferError,
)
from plugin.launch.array_transport import Arrays, rollouts_from_arrays, rollouts_to_arrays
from plugin.launch.console import Console
from plugin.launch.directory_lock import OwnedDirectory
from plugin.launch.placement import Reservation, ResourcePlan
from plugin.launch.preflight import choose_rollouts
from plugin.launch.remote_calls import ReportingActor, result_of, wait_for_all
from plugin.launch.trainer_actor import RankPlace
from plugin.rollout.conversation.trajectory import Rollouts
from plugin.rollout.engines.choice import api_key, make_engine
from plugin.rollout.engines.protocol import (
    BroadcastEngine,
    EngineHealth,
    GenerationRequest,
    SamplingParameters,
)
from plugin.rollout.engines.sleep import EnginePart
from plugin.rollout.engines.weight_buckets import NO_WEIGHTS
from plugin.rollout.engines.weight_stream import WeightGroup

_IDLE_SECONDS = 0.2
_LOAD_POLL_SECONDS = 0.005
#: Ray's concurrency group of `load_weights` with --partial-rollouts.
_WEIGHTS = "weights"


class EngineActor(ReportingActor):
    """The body of an engine's actor: any engine, with answers as flat arrays.

    With --partial-rollouts weights are loaded in a thread of their own, while another generates.
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
        self._engine = make_engine(config, hf_config, name)
        if config.colocate and not hasattr(self._engine, "sleep"):
            raise ConfigError(
                f"--colocate: the engine of --rollout-engine {config.rollout_engine} cannot give "
                "its memory to the trainer; give it sleep(level) and wake(part), or drop --colocate"
            )
        self._rollouts = choose_rollouts(config)
        self._version, self._loaded = NO_WEIGHTS, threading.Condition()
        self._half_loaded = False
        self.health = self._engine.health

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        parameters: SamplingParameters,
        at_least: int = NO_WEIGHTS,
    ) -> Arrays:
        """One trajectory per seed of every request; no token is older than version `at_least`."""
        with self._loaded:
            self._loaded.wait_for(lambda: self._version >= at_least)
        if self._half_loaded:
            raise TransferError("the engine has half a version of the weights, and gets it again")
        return rollouts_to_arrays(Rollouts.of(self._rollouts(self._engine, requests, parameters)))

    def load_weights(self, version: int, bucket: np.ndarray, last: bool) -> None:
        """As `RolloutEngine.load_weights`, from the object store's own memory where it can be."""
        given: Any = bucket if self._reads_views else bucket.tobytes()
        self._engine.load_weights(version, given, last=last)
        if last:
            self._note_version(version)

    def weight_receivers(self) -> int:
        """How many of the engine's workers receive weights."""
        return cast(BroadcastEngine, self._engine).weight_receivers()

    def receive_weights(self, version: int, group: WeightGroup, first: int) -> None:
        """As `BroadcastEngine.receive_weights`."""
        try:
            cast(BroadcastEngine, self._engine).receive_weights(version, group, first)
        except TransferError:
            self._half_loaded = True
            raise
        self._half_loaded = False
        self._note_version(version)

    def _note_version(self, version: int) -> None:
        with self._loaded:
            self._version = version
            self._loaded.notify_all()

    def sleep(self, level: int) -> None:
        """As `SleepingEngine.sleep`."""
        self._engine.sleep(level)  # type: ignore[attr-defined]

    def wake(self, part: EnginePart) -> None:
        """As `SleepingEngine.wake`."""
        self._engine.wake(part)  # type: ignore[attr-defined]


@dataclass
class _Running:
    """One engine's present actor.

    birth: the call that answers when it has started; None once it has
    failures_in_a_row: restarts in a row without an answer in between
    weights: its own directory below --rollout-weights-dir
    version: broadcast: of the weights that it has; NO_WEIGHTS = none, or half of a version
    receivers: broadcast: workers that receive weights; None = not asked yet
    """

    actor: Any
    birth: Any | None
    deadline: float
    failures_in_a_row: int = 0
    weights: OwnedDirectory | None = None
    version: int = NO_WEIGHTS
    receivers: int | None = None

    def end(self) -> None:
        """End the process and remove the weights that it wrote for its servers."""
        import ray

        ray.kill(self.actor)
        if self.weights is not None:
            self.weights.remove()


class EnginePool:
    """Starts the engines; sends requests and weights, which each engine serves in order.

    With --partial-rollouts weights overtake requests: they have a thread of their own in the actor,
    and requests begin with the weights that were sent before them, or newer ones.

    An engine that dies, breaks or hangs is replaced by a new actor that gets the newest weights
    before any request. Its unanswered tickets end in `ActorLost`: send their requests again.

    trainer_places: where the ranks are whose GPUs the engines share with --colocate
    """

    def __init__(
        self,
        config: JobConfig,
        hf_config: Mapping[str, Any],
        plan: ResourcePlan,
        reservation: Reservation,
        console: Console,
        trainer_places: Callable[[], Sequence[RankPlace]] = tuple,
    ) -> None:
        self._trainer_places = trainer_places
        self._config, self._hf_config, self._console = config, hf_config, console
        self._plan, self._reservation = plan, reservation
        key = api_key(config)
        self._secrets = {str(config.rollout_api_key_env): key} if key else {}
        self._broadcasts = config.weight_way == "broadcast"
        self._newest: int | None = None
        self._buckets: list[Any] = []
        #: Gives engines without the newest weights these; None while the trainer cannot.
        self.catch_up: Callable[[], None] | None = None
        self._loads: dict[Any, tuple[int, Any]] = {}
        self._asked: dict[Any, tuple[int, Any]] = {}
        self.restarts = 0
        self._engines = [self._start(number) for number in range(config.num_rollout_engines)]

    def __len__(self) -> int:
        return len(self._engines)

    def _start(self, number: int, failures_in_a_row: int = 0) -> _Running:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        size, environment = self._plan.bundles_per_engine, dict(self._secrets)
        group, bundle = self._reservation.engines, number * size
        if size > 1:
            bundles = range(bundle, bundle + size)
            environment["VLLM_RAY_BUNDLE_INDICES"] = ",".join(map(str, bundles))
        if group is None:
            nodes = self._reservation.trainer_nodes
            group, bundle = self._reservation.trainer, nodes[number % len(nodes)]
            if "GPU" in self._plan.rank:
                first, devices = self._shared_gpus(number)
                bundle = nodes[first // self._config.ranks_per_node]
                environment["CUDA_VISIBLE_DEVICES"] = devices
        config, weights = self._config, None
        if config.rollout_weights_dir is not None:
            root = Path(config.rollout_weights_dir)
            weights = OwnedDirectory(root, "megatron_tis_", "--rollout-weights-dir")
            config = replace(config, rollout_weights_dir=str(weights.path))
        remote: Any = ray.remote
        if config.partial_rollouts:
            remote = remote(concurrency_groups={_WEIGHTS: 1})
        body: Any = remote(EngineActor)
        actor = body.options(
            num_cpus=self._plan.engine["CPU"],
            num_gpus=self._plan.engine.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
        ).remote(config, self._hf_config, f"engine {number}", environment)
        deadline = time.monotonic() + config.start_timeout
        return _Running(actor, actor.call.remote("health"), deadline, failures_in_a_row, weights)

    def _shared_gpus(self, number: int) -> tuple[int, str]:
        """The first of the ranks whose GPUs engine `number` uses with --colocate, and the GPUs."""
        size = self._config.rollout_num_gpus_per_engine
        first = number * size
        places = self._trainer_places()[first : first + size]
        return first, ",".join(str(place.device) for place in places)

    def wait_until_ready(self) -> list[EngineHealth]:
        """Every engine's health, once all have started."""
        calls = [engine.actor.call.remote("health") for engine in self._engines]
        names = [f"engine {number}" for number in range(len(self))]
        healths = wait_for_all(calls, names, self._console, timeout=self._config.start_timeout)
        for engine in self._engines:
            engine.birth = None
        return healths

    def available(self) -> list[int]:
        """Numbers of the engines that have started, and have weights."""
        return [
            number
            for number, engine in enumerate(self._engines)
            if engine.birth is None and (not self._broadcasts or engine.version != NO_WEIGHTS)
        ]

    def send(
        self, engine: int, requests: Sequence[GenerationRequest], parameters: SamplingParameters
    ) -> Any:
        """A ticket for the answer of engine number `engine`."""
        actor = self._engines[engine].actor
        arguments = [list(requests), parameters]
        if self._config.partial_rollouts and self._newest is not None:
            arguments.append(self._newest)
        ticket = actor.call.remote("generate", *arguments)
        self._asked[ticket] = (engine, actor)
        return ticket

    def finished(self, tickets: list[Any], *, wait_seconds: float) -> list[Any]:
        """The tickets that have an answer or have failed; waits so long for the first."""
        import ray

        self.poll()
        if not tickets:
            time.sleep(min(wait_seconds, _IDLE_SECONDS))
            return []
        wanted = 1 if wait_seconds else len(tickets)
        return ray.wait(tickets, num_returns=wanted, timeout=wait_seconds)[0]

    def answer(self, ticket: Any) -> Rollouts:
        """The answer of a finished ticket; `ActorLost` if its engine is gone and has been replaced.

        Our own errors (a wrong answer, a configuration that cannot work) are not tried again.
        """
        if ticket not in self._asked:
            raise ActorLost("the engine was replaced before it answered")
        number, actor = self._asked.pop(ticket)
        try:
            answer = rollouts_from_arrays(result_of(ticket, f"engine {number}", self._console))
        except TransferError as error:
            raise ActorLost(str(error)) from error
        except ParallelError as error:
            self.replace_unless_done(number, actor, str(error))
            raise ActorLost(str(error)) from error
        self._engines[number].failures_in_a_row = 0
        return answer

    def replace(self, engine: int, reason: str) -> None:
        """End an engine and start another for it; an `EngineError` if that keeps happening."""
        old = self._engines[engine]
        if old.failures_in_a_row >= self._config.max_restarts:
            raise EngineError(
                f"engine {engine} was restarted {old.failures_in_a_row} times without answering a "
                f"request, the limit of --max-restarts; the last time it {reason}"
            )
        self._console.say(f"engine {engine} is replaced: {reason.splitlines()[0]}")
        old.end()
        self.restarts += 1
        self._loads = {ref: owner for ref, owner in self._loads.items() if owner[0] != engine}
        self._asked = {ref: owner for ref, owner in self._asked.items() if owner[0] != engine}
        self._engines[engine] = self._start(engine, old.failures_in_a_row + 1)
        self._load(engine)

    def replace_unless_done(self, number: int, actor: Any, reason: str) -> None:
        """Both tickets of a dead engine fail; only the first one replaces it."""
        if self._engines[number].actor is actor:
            self.replace(number, reason)

    def begin_version(self, version: int) -> None:
        """Have all engines lack the newest weights, which are `version` from now on."""
        self._newest, self._buckets = version, []

    def send_weights(self, buckets: Sequence[Any]) -> None:
        """Queue the newest weights behind what each engine is doing; `finish_loads` waits for them.

        With --partial-rollouts they interrupt it.
        """
        self._buckets = list(buckets)
        for number in range(len(self)):
            self._load(number)

    def _load(self, number: int) -> None:
        actor = self._engines[number].actor
        for place, bucket in enumerate(self._buckets):
            last = place == len(self._buckets) - 1
            call = self._call_for_weights(actor, "load_weights", self._newest, bucket, last)
            self._loads[call] = (number, actor)

    def _call_for_weights(self, actor: Any, method: str, *arguments: Any) -> Any:
        call = actor.call
        if self._config.partial_rollouts:
            call = call.options(concurrency_group=_WEIGHTS)
        return call.remote(method, *arguments)

    def lagging(self) -> list[int]:
        """Numbers of the engines that lack the newest weights; by broadcast they get them."""
        if self._newest is None or not self._broadcasts:
            return []
        return [n for n, engine in enumerate(self._engines) if engine.version != self._newest]

    def weight_receivers(self, engines: Sequence[int]) -> list[tuple[int, Any, int]]:
        """Number, actor and receiving workers of those of `engines` that have started."""
        found = []
        for number in engines:
            engine = self._engines[number]
            if engine.birth is not None:
                continue
            if engine.receivers is None:
                call = self._call_for_weights(engine.actor, "weight_receivers")
                try:
                    engine.receivers = result_of(call, f"engine {number}", self._console)
                except ParallelError as error:
                    self.replace_unless_done(number, engine.actor, str(error))
                    continue
            found.append((number, engine.actor, int(engine.receivers)))
        return found

    def receive(self, engine: int, group: WeightGroup, first: int) -> Any:
        """The call by which an engine receives the newest weights; until then it has none."""
        self._engines[engine].version = NO_WEIGHTS
        actor = self._engines[engine].actor
        return self._call_for_weights(actor, "receive_weights", self._newest, group, first)

    def has_received(self, engine: int, actor: Any) -> None:
        """Note that an engine has the newest weights, unless it was replaced."""
        if self._engines[engine].actor is actor:
            self._engines[engine].version = int(self._newest or 0)

    def poll(self) -> None:
        """Notice engines that have started, died while loading, or cannot start.

        Waits for nothing but engines that catch up.
        """
        import ray

        watched = [*self._loads, *(e.birth for e in self._engines if e.birth is not None)]
        if watched:
            self._note_finished(ray.wait(watched, num_returns=len(watched), timeout=0)[0])
        if self.catch_up is not None and self.lagging():
            self.catch_up()

    def _note_finished(self, done: list[Any]) -> None:
        import ray

        for reference in done:
            if reference not in self._loads:
                continue
            number, actor = self._loads.pop(reference)
            try:
                result_of(reference, f"engine {number}", self._console)
            except SenderLost:
                # A trainer rank died while it sent its weights: no engine would get them.
                raise
            except ActorLost as error:
                self.replace_unless_done(number, actor, str(error))
        for number, engine in enumerate(self._engines):
            if engine.birth in done:
                birth, engine.birth = engine.birth, None
                try:
                    result_of(birth, f"engine {number}", self._console)
                except ParallelError as error:
                    self.replace_unless_done(number, engine.actor, str(error))
            elif engine.birth is not None and time.monotonic() > engine.deadline:
                slots = ray.cluster_resources().get("CPU", 0)
                raise ClusterError(
                    f"engine {number} did not start within {self._config.start_timeout:g} s; the "
                    f"cluster has no room for it any more ({slots:g} CPU slots in all), or it is "
                    "overloaded; add nodes, or raise --start-timeout"
                )

    def finish_loads(self) -> None:
        """Wait until every engine has the weights sent last; one that hangs is replaced."""
        patience = self._config.engine_patience
        # An engine may still have requests to serve that were sent before the weights.
        deadline = time.monotonic() + 3 * patience
        while self._loads:
            self.poll()
            if time.monotonic() > deadline:
                for number in {owner[0] for owner in self._loads.values()}:
                    self.replace(number, "did not load its weights in time")
                deadline = time.monotonic() + self._config.start_timeout + patience
            time.sleep(_LOAD_POLL_SECONDS)

    def sleep(self, level: int) -> None:
        """Have every engine give up its device's memory."""
        self._tell_all("sleep", level)

    def wake(self, part: EnginePart) -> None:
        """Have every engine take memory for `part` again."""
        self._tell_all("wake", part)

    def _tell_all(self, method: str, argument: Any) -> None:
        """Call every engine and wait; one that is lost is replaced, and the new one is told."""
        left = set(range(len(self)))
        patience = self._config.start_timeout + self._config.engine_patience
        while left:
            calls = {n: self._engines[n].actor.call.remote(method, argument) for n in left}
            for number, call in calls.items():
                try:
                    wait_for_all([call], [f"engine {number}"], self._console, timeout=patience)
                except ParallelError as error:
                    self.replace(number, str(error))
                else:
                    left.remove(number)

    def forget(self) -> None:
        """Drop every answer and load under way: the trainer goes back to an earlier state."""
        self._loads.clear()
        self._asked.clear()
        self._newest, self._buckets = None, []

    def require_version(self, version: int) -> None:
        """An `EngineError` unless every engine generates with `version`."""
        for health in self.wait_until_ready():
            if health.weight_version != version:
                raise EngineError(
                    f"{health.name} has weight version {health.weight_version}, expected {version}"
                )

    def close(self) -> None:
        """End the actors."""
        for engine in self._engines:
            engine.end()
