"""The driver's handle on the rollout engines, which are Ray actors."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugin.cluster.array_transport import rejoined
from plugin.cluster.assignments import Assignments
from plugin.cluster.directory_lock import OwnedDirectory
from plugin.cluster.engine_actor import ANSWERS, BUNDLES, WEIGHTS, EngineActor, answer_parts
from plugin.cluster.placement import Reservation, ResourcePlan
from plugin.cluster.remote_calls import EndedCalls, result_of, wait_for_all
from plugin.cluster.trainer_actor import RankPlace
from plugin.config import JobConfig
from plugin.engines.choice import api_key
from plugin.engines.protocol import (
    EngineHealth,
    EnginePart,
    GenerationRequest,
    SamplingParameters,
)
from plugin.engines.weight_changes import ProbeAnswer, WeightProbe
from plugin.environments.trajectory import Rollouts
from plugin.errors import (
    ClusterError,
    EngineError,
    MegatronTisError,
    ParallelError,
    SenderLost,
    TransferError,
)
from plugin.observe.console import Console
from plugin.weights.buckets import NO_WEIGHTS
from plugin.weights.checksums import Checksums
from plugin.weights.group import WeightGroup

_IDLE_SECONDS = 0.2
_LOAD_POLL_SECONDS = 0.05
#: How often engines that have groups are asked for their progress.
_PROGRESS_SECONDS = 10.0


@dataclass
class _Running:
    """The current actor of one engine.

    starting: the call that answers when it has started; None once it has
    failures_in_a_row: restarts in a row without an answer in between
    weights: its own directory below --rollout-weights-dir
    version: of the weights that it got from the ranks; NO_WEIGHTS = none, or half of a version
    is_verified: whether it has shown that it computes with the trainer's weights
    """

    actor: Any
    starting: Any | None
    deadline: float
    failures_in_a_row: int = 0
    weights: OwnedDirectory | None = None
    version: int = NO_WEIGHTS
    is_verified: bool = False
    #: Whether a call waits there for groups that are done.
    collects: bool = False
    era: int = 0
    #: Whether the job goes on without it until it has started.
    is_absent: bool = False

    def end(self) -> None:
        """End the process and remove the weights that it wrote for its servers."""
        import ray

        if self.actor is not None:
            ray.kill(self.actor)
        if self.weights is not None:
            self.weights.remove()


@dataclass(frozen=True)
class Probed:
    """What an engine answered to the probe."""

    engine: int
    actor: Any
    answers: list[ProbeAnswer]


class EnginePool:
    """Starts the engines; sends groups and weights, and receives groups as they are done.

    A group begins with the weights that were sent before it, or newer ones. Weights wait for the
    responses under way, not for groups that wait; with --partial-rollouts they wait for nothing.

    At each engine that has groups one call waits for those that are done. An engine that dies,
    breaks or hangs is replaced by a new actor that gets the newest weights before any group. What
    it had comes back as lost: send it again.

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
        self._from_ranks = config.transport_traits.from_ranks
        self._newest: int | None = None
        self._buckets: list[Any] = []
        #: Gives engines without the newest weights these; None while the trainer cannot.
        self.catch_up: Callable[[], None] | None = None
        #: What engines are asked with new weights until they are verified; None = nothing.
        self.probe: WeightProbe | None = None
        self._probed: list[Probed] = []
        #: How often an engine got buckets again, because its checksums were not the trainer's.
        self.repairs = 0
        self._checksums: Checksums = {}
        self._is_asleep = False
        # Calls that have not ended, of which actor; and those that have ended, to be dealt with.
        self._calls, self._ended = EndedCalls(), deque[tuple[Any, Future[Any]]]()
        self._starts: dict[Any, tuple[int, Any]] = {}
        self._loads: dict[Any, tuple[int, Any]] = {}
        self._pings: dict[Any, tuple[int, Any]] = {}
        self._next_pings = 0.0
        self._collects: dict[Any, tuple[int, Any]] = {}
        self._bulk: dict[int, list[Any]] = {}  # of the answer that each engine is asked for
        self._arrived: list[tuple[Any, Future[Any]]] = []  # collects that have ended
        self._assignments = Assignments(config.engine_patience)
        self._lost: list[int] = []  # groups that were at engines that were replaced
        self._era = 0  # ends when an engine's groups are dropped
        self.restarts = 0
        # Engines on the trainer's devices move in step with all ranks beside them.
        self._fewest = config.num_rollout_engines
        if not config.colocate:
            self._fewest = min(self._fewest, config.min_rollout_engines or 1)
        self._retries: dict[int, float] = {}  # absent engines without an actor, and when to try
        # Those that do not have the newest weights, where they get them from ranks.
        self._lagging: set[int] = set()
        self._engines: list[_Running] = []
        for number in range(config.num_rollout_engines):
            self._engines.append(self._start(number))
            self._watch_start(number)
        self._start_without(self._unplaced())

    def _unplaced(self) -> list[int]:
        """Numbers of the engines for which the cluster has no room yet."""
        if self._plan.fewest_engines is None:
            return []
        placed = self._reservation.placed_engines()
        return [number for number in range(len(self._engines)) if number not in placed]

    def _start_without(self, engines: Sequence[int]) -> None:
        """Begin without engines; Ray starts them as soon as there is room for them."""
        for number in engines:
            self._engines[number].is_absent, self._engines[number].deadline = True, math.inf
            self._update(number)
        if engines:
            self._console.warn(
                f"the cluster has room for {len(self)} of {len(self._engines)} engines (at least "
                f"--min-rollout-engines {self._fewest}); the others join when it has more"
            )

    def __len__(self) -> int:
        """How many engines are there, or about to be."""
        return len(self._present)

    @property
    def _present(self) -> list[int]:
        """Numbers of the engines that the job does not go on without."""
        return [number for number, engine in enumerate(self._engines) if not engine.is_absent]

    def _start(self, number: int, failures_in_a_row: int = 0) -> _Running:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        size, environment = self._plan.bundles_per_engine, dict(self._secrets)
        if self._reservation.engines:
            group, bundle = self._reservation.bundle_of_engine(number, size)
            if size > 1:
                bundles = range(bundle, bundle + size)
                environment[BUNDLES] = ",".join(map(str, bundles))
        else:
            nodes = self._reservation.trainer_nodes
            group, bundle = self._reservation.trainer, nodes[number % len(nodes)]
            if "GPU" in self._plan.rank:  # those of the ranks beside it
                count = self._config.rollout_num_gpus_per_engine
                places = self._trainer_places()[number * count : (number + 1) * count]
                bundle = nodes[number * count // self._config.ranks_per_node]
                devices = ",".join(str(place.device) for place in places)
                environment["CUDA_VISIBLE_DEVICES"] = devices
        config, weights = self._config, None
        if config.rollout_weights_dir is not None:
            root = Path(config.rollout_weights_dir)
            weights = OwnedDirectory(root, "megatron_tis_", "--rollout-weights-dir")
            config = config.unchecked_copy(rollout_weights_dir=str(weights.path))
        # Calls are begun in the order in which they were made, those of a group also ended.
        remote: Any = ray.remote
        body: Any = remote(concurrency_groups={WEIGHTS: 1, ANSWERS: 1})(EngineActor)
        actor = body.options(
            num_cpus=self._plan.engine["CPU"],
            num_gpus=self._plan.engine.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
        ).remote(config, self._hf_config, f"engine {number}", environment)
        deadline = time.monotonic() + config.load_patience
        return _Running(actor, actor.call.remote("health"), deadline, failures_in_a_row, weights)

    def _watch_start(self, number: int) -> None:
        """Note when an engine has started."""
        engine = self._engines[number]
        self._starts[engine.starting] = number, engine.actor
        self._calls.add(engine.starting)
        self._update(number)

    def _update(self, number: int) -> None:
        """Note whether an engine lacks weights and whether it may get groups."""
        engine = self._engines[number]
        lags = self._from_ranks and self._newest is not None and engine.version != self._newest
        if lags and not engine.is_absent:
            self._lagging.add(number)
        else:
            self._lagging.discard(number)
        has_weights = not self._from_ranks or engine.version != NO_WEIGHTS
        self._assignments.set_open(number, engine.starting is None and has_weights)

    def wait_until_ready(self) -> list[EngineHealth]:
        """Every engine's health, once all have started."""
        present = self._present
        calls = [self._engines[number].actor.call.remote("health") for number in present]
        names = [f"engine {number}" for number in present]
        limits: Any = {"timeout": self._config.load_patience, "option": "--load-timeout"}
        healths = wait_for_all(calls, names, self._console, **limits)
        for number in present:
            self._engines[number].starting = None
            self._update(number)
        self._starts = {c: who for c, who in self._starts.items() if who[0] not in present}
        return healths

    def least_loaded(self) -> tuple[int, int] | None:
        """The engine with the fewest groups, and how many it has.

        Of those that have started and have weights; None without any.
        """
        return self._assignments.least_loaded()

    def send(
        self, engine: int, requests: Mapping[int, GenerationRequest], parameters: SamplingParameters
    ) -> None:
        """Have engine number `engine` generate groups, by their numbers."""
        at_least = NO_WEIGHTS if self._newest is None else self._newest
        actor = self._engines[engine].actor
        actor.call.remote("submit", dict(requests), parameters, at_least)
        self._assignments.add(engine, requests)
        self._collect_from(engine)

    def _collect_from(self, number: int) -> None:
        """Keep one `collect` call waiting at an engine that has groups."""
        engine = self._engines[number]
        if engine.collects or not self._assignments.load(number):
            return
        size = 1 + answer_parts(self._config)
        method = engine.actor.call_apart.options(concurrency_group=ANSWERS, num_returns=size)
        call, *self._bulk[number] = method.remote("collect", engine.era)
        engine.collects, self._collects[call] = True, (number, engine.actor)
        self._calls.add(call)

    def receive(self, *, wait_seconds: float) -> tuple[list[Rollouts], list[int]]:
        """Groups that are done, and numbers of those that were lost with their engine.

        wait_seconds: for the first; our own errors (a wrong answer, a configuration that cannot
            work) are raised, not retried
        """
        self.poll()
        if wait_seconds and not (self._arrived or self._lost):
            self._handle_ended(wait_seconds if self._collects else min(wait_seconds, _IDLE_SECONDS))
        answers = []
        while self._arrived:
            if (answer := self._receive_from(*self._arrived.pop(0))) is not None:
                answers.append(answer)
        self._ask_for_progress()
        for number, reason in self._assignments.hung().items():
            self.replace(number, reason)
        lost, self._lost = self._lost, []
        return answers, lost

    def _ask_for_progress(self) -> None:
        """Ask busy engines now and then how many tokens they have generated; never waits."""
        now = time.monotonic()
        if now < self._next_pings:
            return
        self._next_pings = now + min(_PROGRESS_SECONDS, self._config.engine_patience / 4)
        asked = {n for n, actor in self._pings.values() if self._engines[n].actor is actor}
        for number, engine in enumerate(self._engines):
            if self._assignments.load(number) and number not in asked:
                call = self.ping(engine.actor)
                self._pings[call] = number, engine.actor
                self._calls.add(call)

    def _end_ping(self, call: Any, ended: Future[Any]) -> None:
        number, actor = self._pings.pop(call)
        # The call that waits for its groups tells what is wrong with an engine.
        with contextlib.suppress(MegatronTisError):
            progress = result_of(call, f"engine {number}", self._console, ended)
            if self._engines[number].actor is actor:
                self._assignments.note_progress(number, progress)

    def _receive_from(self, call: Any, ended: Future[Any]) -> Rollouts | None:
        number, actor = self._collects.pop(call, (None, None))
        if number is None:  # of an engine that was replaced since
            return None
        self._engines[number].collects = False
        try:
            arrays = result_of(call, f"engine {number}", self._console, ended)
        except ParallelError as error:
            self.replace_unless_done(number, actor, str(error))
            return None
        rollouts = rejoined(arrays, self._bulk.pop(number))
        if len(rollouts):
            self._engines[number].failures_in_a_row = 0
            self._assignments.remove_answered(number, set(rollouts.groups.tolist()))
        self._collect_from(number)
        return rollouts if len(rollouts) else None

    def replace(self, engine: int, reason: str) -> None:
        """End an engine and start another for it; an `EngineError` if that keeps happening.

        The groups that it had are lost; `receive` names them.
        """
        old = self._engines[engine]
        if old.failures_in_a_row >= self._config.max_restarts:
            error = EngineError(
                f"engine {engine} was restarted {old.failures_in_a_row} times without answering a "
                f"request, the limit of --max-restarts; the last time it {reason}"
            )
            self._go_on_without(engine, error, retry_seconds=self._config.start_timeout)
            return
        self._console.log(f"engine {engine} is replaced: {reason.splitlines()[0]}")
        self._drop(engine)
        self.restarts += 1
        self._engines[engine] = self._start(engine, old.failures_in_a_row + 1)
        self._watch_start(engine)
        self._load(engine)

    def _drop(self, engine: int) -> None:
        """End an engine's actor and forget its calls; `receive` names the groups that it had."""
        self._engines[engine].end()
        self._loads = {ref: owner for ref, owner in self._loads.items() if owner[0] != engine}
        self._collects = {ref: owner for ref, owner in self._collects.items() if owner[0] != engine}
        self._starts = {ref: owner for ref, owner in self._starts.items() if owner[0] != engine}
        self._lost += self._assignments.remove_lost(engine)

    def _go_on_without(self, engine: int, error: MegatronTisError, *, retry_seconds: float) -> None:
        """Do without an engine until it has started again, or raise `error` if too few are left."""
        old = self._engines[engine]
        left = len(self) - (not old.is_absent)
        if left < self._fewest:
            raise error
        self._drop(engine)
        if not old.is_absent:
            self._console.warn(
                f"{error}; the job goes on with {left} of {len(self._engines)} engines (at least "
                f"--min-rollout-engines {self._fewest})"
            )
        failures = old.failures_in_a_row
        self._engines[engine] = _Running(None, None, math.inf, failures, is_absent=True)
        self._retries[engine] = time.monotonic() + retry_seconds
        self._update(engine)

    def _retry_absent(self) -> None:
        """Start absent engines when it is time; Ray does so as soon as there is room for them."""
        for number, when in list(self._retries.items()):
            if time.monotonic() >= when:
                del self._retries[number]
                made = self._start(number, self._engines[number].failures_in_a_row)
                made.deadline, made.is_absent = math.inf, True
                self._engines[number] = made
                self._watch_start(number)

    def replace_unless_done(self, number: int, actor: Any, reason: str) -> None:
        """Replace an engine unless another failed call of the same actor already has."""
        if self._engines[number].actor is actor:
            self.replace(number, reason)

    def begin_version(self, version: int) -> None:
        """Declare `version` the newest weights, which every engine now lacks."""
        self._newest, self._buckets, self._checksums = version, [], {}
        for number in self._present:
            self._update(number)

    def send_weights(self, buckets: Sequence[Any], checksums: Checksums | None = None) -> None:
        """Have every engine load the newest weights when it can; `finish_loads` waits for them.

        checksums: the trainer's, where engines report theirs
        """
        self._buckets, self._checksums = list(buckets), checksums or {}
        for number in self._present:
            self._load(number)

    def _load(self, number: int, *, again: bool = False) -> None:
        """Send an engine the newest weights; again: once more, see `EngineActor.load_weights`."""
        actor = self._engines[number].actor
        for place, bucket in enumerate(self._buckets):
            last = place == len(self._buckets) - 1
            probe = self._probe_for(number) if last else None
            arguments = [self._newest, bucket, last, probe]
            if again:
                arguments += [None, place == 0]
            elif probe is not None and self._checksums:
                arguments.append(self._checksums)
            call = self._call_for_weights(actor, "load_weights", *arguments)
            self._loads[call] = (number, actor)
            self._calls.add(call)

    def _probe_for(self, number: int) -> WeightProbe | None:
        """What an engine is asked right after it has the newest weights.

        One on shared devices has no memory for a response at that time, see `wake`; it reports
        checksums.
        """
        if self.probe is None or not self._is_probe_due(number):
            return None
        return self.probe.without_response() if self._is_asleep else self.probe

    def _is_probe_due(self, number: int) -> bool:
        if self.probe is None or self._newest is None:
            return False
        verified = self._engines[number].is_verified
        return self._config.verifies_weights(self._newest, verified=verified)

    @property
    def any_probe_due(self) -> bool:
        """Whether an engine has to show that it computes with the newest weights."""
        return any(map(self._is_probe_due, self._present))

    def take_probed(self) -> list[Probed]:
        """What present engines answered to the probe since the last call."""
        probed, self._probed = self._probed, []
        return [p for p in probed if self._engines[p.engine].actor is p.actor]

    def set_verified(self, probed: Probed) -> None:
        """Note that an engine computes with the trainer's weights."""
        engine = self._engines[probed.engine]
        engine.is_verified |= engine.actor is probed.actor

    @property
    def all_verified(self) -> bool:
        """Whether every engine has shown that it computes with the trainer's weights."""
        return self.probe is None or all(self._engines[n].is_verified for n in self._present)

    def _note_probed(self, number: int, actor: Any, answers: list[ProbeAnswer]) -> None:
        responses = [answer for answer in answers if answer.answers]
        if responses:
            self._probed.append(Probed(number, actor, responses))

    def _call_for_weights(self, actor: Any, method: str, *arguments: Any) -> Any:
        return actor.call.options(concurrency_group=WEIGHTS).remote(method, *arguments)

    def lagging(self) -> list[int]:
        """Numbers of the engines that lack the newest weights, where they get them from ranks."""
        return sorted(self._lagging)

    def lagging_and_started(self) -> list[int]:
        """Those of them that have started."""
        return [number for number in self.lagging() if self._engines[number].starting is None]

    def ask_lagging(self, method: str) -> list[tuple[int, Any, Any]]:
        """Call `method` on every lagging engine that has started: number, actor and call."""
        asked = [(number, self._engines[number].actor) for number in self.lagging_and_started()]
        return [(n, actor, self._call_for_weights(actor, method)) for n, actor in asked]

    def ping(self, actor: Any) -> Any:
        """A call that a live engine answers at once, whatever its other threads do."""
        return actor.call.remote("ping")

    def receive_weights(
        self, engine: int, actor: Any, group: WeightGroup, first: int, *, again: bool = False
    ) -> Any:
        """The call by which an engine receives the newest weights; until then it has none.

        again: once more
        """
        self._engines[engine].version = NO_WEIGHTS
        self._update(engine)
        probe = self._probe_for(engine)
        receive = (actor, "receive_weights", self._newest, group, first, probe)
        return self._call_for_weights(*receive, *([again] if again else []))

    def has_received(self, engine: int, actor: Any, answers: list[ProbeAnswer]) -> None:
        """Note that an engine has the newest weights, unless it was replaced, and let it generate.

        answers: its own to the probe
        """
        if self._engines[engine].actor is actor:
            self._engines[engine].version = int(self._newest or 0)
            self._update(engine)
            if any(answer.checksums for answer in answers or ()):
                self._call_for_weights(actor, "accept_weights", self._newest)
            self._note_probed(engine, actor, answers)

    def poll(self) -> None:
        """Notice engines that have started, died while loading, or cannot start.

        Waits for nothing but engines that catch up.
        """
        self._handle_ended()
        for number, _ in list(self._starts.values()):
            if time.monotonic() > self._engines[number].deadline:
                self._give_up_starting(number)
        if self._retries:
            self._retry_absent()
        if self.catch_up is not None and self._lagging:
            self.catch_up()

    def _handle_ended(self, wait_seconds: float = 0.0) -> None:
        """Deal with calls that have ended; waits for the first."""
        self._ended.extend(self._calls.take(0.0 if self._ended else wait_seconds).items())
        while self._ended:
            call, ended = self._ended.popleft()
            if call in self._collects:
                self._arrived.append((call, ended))
            elif call in self._loads:
                self._end_load(call, ended)
            elif call in self._starts:
                self._end_start(call, ended)
            elif call in self._pings:
                self._end_ping(call, ended)

    def _end_load(self, call: Any, ended: Future[Any]) -> None:
        number, actor = self._loads.pop(call)
        try:
            answers = result_of(call, f"engine {number}", self._console, ended)
            self._note_probed(number, actor, answers)
        except TransferError as error:
            self.repairs += 1
            self._console.warn(f"engine {number}: {error}; it gets the version again")
            if self._engines[number].actor is actor:
                self._load(number, again=True)
        except SenderLost:
            # A trainer rank died while it sent its weights: no engine would get them.
            raise
        except ParallelError as error:
            self.replace_unless_done(number, actor, str(error))

    def _end_start(self, call: Any, ended: Future[Any]) -> None:
        number, actor = self._starts.pop(call)
        self._engines[number].starting = None
        try:
            result_of(call, f"engine {number}", self._console, ended)
        except ParallelError as error:
            if self._engines[number].is_absent:
                self._go_on_without(number, error, retry_seconds=self._config.start_timeout)
            else:
                self.replace_unless_done(number, actor, str(error))
            return
        if self._engines[number].is_absent:
            self._engines[number].is_absent = False
            self._console.log(f"engine {number} has joined: {len(self)} of {len(self._engines)}")
            self._load(number)
        self._update(number)

    def _give_up_starting(self, number: int) -> None:
        """Go on without an engine whose actor waits for room; Ray starts it when there is some."""
        import ray

        slots = ray.cluster_resources().get("CPU", 0)
        error = ClusterError(
            f"engine {number} did not start within {self._config.load_patience:g} s; the cluster "
            f"has no room for it any more ({slots:g} CPU slots in all), or it is overloaded; add "
            "nodes, or raise --load-timeout"
        )
        self._go_on_without(number, error, retry_seconds=0.0)

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
                deadline = time.monotonic() + self._config.load_patience + patience
            self._handle_ended(_LOAD_POLL_SECONDS)

    def sleep(self, level: int) -> None:
        """Have every engine give up its device's memory, and with it its weights."""
        self._is_asleep = True
        self._tell_all("sleep", level)
        for number, engine in enumerate(self._engines):
            engine.version = NO_WEIGHTS
            self._update(number)

    def wake(self, part: EnginePart) -> None:
        """Have every engine take memory for `part` again; once awake they answer the probe."""
        self._tell_all("wake", part)
        if part == "cache":
            self._is_asleep = False
            # Their weights came while they had no memory for a response.
            self._answer_probe([n for n in self._present if self._is_probe_due(n)])

    def probe_returned_servers(self) -> None:
        """Probe engines one of whose servers came back and got its weights between two versions."""
        if self.probe is None or not self._config.engine_traits.asks_servers:
            return
        # One that is loading is asked the next time: its answer would have to wait.
        loading = {number for number, _ in self._loads.values()}
        started = [
            n
            for n, e in enumerate(self._engines)
            if e.starting is None and n not in loading and not e.is_absent
        ]
        found = self._answers(started, "awaits_probe")
        self._answer_probe([number for number, awaits in found.items() if awaits])

    def _answer_probe(self, numbers: Sequence[int]) -> None:
        for number, answers in self._answers(numbers, "answer_probe", self.probe).items():
            self._note_probed(number, self._engines[number].actor, answers)

    def _answers(self, numbers: Sequence[int], method: str, *arguments: Any) -> dict[int, Any]:
        """What engines answer to a call, by number; one that is lost is replaced instead."""
        actors = {number: self._engines[number].actor for number in numbers}
        calls = {n: self._call_for_weights(a, method, *arguments) for n, a in actors.items()}
        return self._results(actors, calls, self._config.engine_patience)

    def _results(
        self, actors: Mapping[int, Any], calls: Mapping[int, Any], patience: float
    ) -> dict[int, Any]:
        found = {}
        for number, call in calls.items():
            name = f"engine {number}"
            try:
                [found[number]] = wait_for_all(
                    [call], [name], self._console, timeout=patience, option="--rollout-timeout"
                )
            except ParallelError as error:
                self.replace_unless_done(number, actors[number], str(error))
        return found

    def _tell_all(self, method: str, argument: Any) -> None:
        """Call every engine and wait; one that is lost is replaced, and the new one called."""
        left = set(self._present)
        while left:
            starting = any(self._engines[number].starting is not None for number in left)
            patience = self._config.engine_patience + starting * self._config.load_patience
            actors = {number: self._engines[number].actor for number in left}
            calls = {n: actor.call.remote(method, argument) for n, actor in actors.items()}
            left -= self._results(actors, calls, patience).keys()

    def forget(self) -> None:
        """Drop every group and load under way: the trainer goes back to an earlier state."""
        self._forget_weights()
        for number in range(len(self._engines)):
            self._cancel(number)
        self._assignments.clear()
        self._lost.clear()

    def keep_groups(self) -> None:
        """Drop every load under way, and keep groups, as `forget` does not.

        Those of engines that were just getting weights are lost: `receive` names them.
        """
        loading = {number for number, _ in self._loads.values()}
        if self._from_ranks:
            loading |= {n for n in self._present if self._engines[n].version == NO_WEIGHTS}
        self._forget_weights()
        for number in loading:
            self._lost += self._assignments.remove_lost(number)
            self._cancel(number)

    def cancel_groups(self) -> None:
        """Have every engine drop the groups that it has, which are not waited for."""
        for number in self._present:
            if self._assignments.load(number):
                self._assignments.remove_lost(number)
                self._cancel(number)

    def _forget_weights(self) -> None:
        self._loads.clear()
        self._probed.clear()
        self._newest, self._buckets, self._checksums = None, [], {}
        for number in range(len(self._engines)):
            self._update(number)

    def _cancel(self, number: int) -> None:
        """Have an engine drop its groups, also finished ones."""
        self._era += 1
        engine = self._engines[number]
        engine.era, engine.collects = self._era, False
        self._collects = {ref: owner for ref, owner in self._collects.items() if owner[0] != number}
        if engine.actor is not None:
            engine.actor.call.remote("cancel", self._era)

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
