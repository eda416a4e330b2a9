"""Reward workers on the nodes of a cluster, as the driver sees them: one more `Pool`."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from plugin.cluster.placement import reward_places
from plugin.cluster.remote_calls import EndedCalls, Heartbeat
from plugin.cluster.reward_actor import CONTROL, RewardActor
from plugin.config import JobConfig
from plugin.environments.deadline_calls import CallFailure
from plugin.observe.console import Console
from plugin.rewards.pool import Job, Results, RewardPool, RewardSource
from plugin.rewards.scorers import MOST_WORKERS, local_pool

#: Responses that an actor may have, for each of its workers: one that is scored, one that waits.
_AHEAD = 2
#: A response whose actor was lost so often is the likely cause.
_MOST_LOSSES = 3
_LOOK_SECONDS = 1.0
_CLOSE_SECONDS = 5.0


@dataclass(eq=False)
class _Node:
    """The current actor of one node.

    node: where it should be; elsewhere if that is gone
    jobs: those that it has
    deadline: by when it has to have started
    failures_in_a_row: actors that were lost without having scored anything
    """

    node: str
    workers: int
    actor: Any
    deadline: float
    failures_in_a_row: int
    has_started: bool = False
    jobs: int = 0

    @property
    def room(self) -> int:
        """How many responses it may get."""
        return _AHEAD * self.workers - self.jobs if self.has_started else 0


class RewardNodes:
    """Has responses scored by actors on the nodes of a cluster, a few at a time.

    Nothing waits for the actors to start, nor for each other. What an actor had that is lost goes
    to others; a new one starts in its place. If there is none left, workers on this machine do the
    rest. A thread of its own makes and answers the calls.

    source: what the workers load
    """

    def __init__(self, console: Console, source: RewardSource, config: JobConfig) -> None:
        self._source, self._config, self._console = source, config, console
        # With how often the actor that had it was lost.
        self._waiting: deque[tuple[Job, int]] = deque()
        self._calls = EndedCalls()
        self._asked: dict[Any, tuple[_Node, list[tuple[Job, int]]]] = {}
        self._nodes: list[_Node] = []
        self._heartbeat: Heartbeat[_Node] = Heartbeat(_ping)
        self._local: RewardPool | None = None
        self._is_closed = False
        self._failure: CallFailure | None = None
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self.restarts = 0

    def begin(self, left: Mapping[str, float]) -> None:
        """Start actors; on a cluster of one node, or without CPUs for them, workers here.

        What is enqueued before waits.

        left: CPUs that ranks and engines leave on each node
        """
        wanted = self._config.reward_workers
        places = {} if len(left) == 1 else reward_places(wanted, left, MOST_WORKERS)
        for node, count in places.items():
            self._nodes.append(self._start(node, count))
        if not places:
            self._fall_back()
        self._thread.start()

    def enqueue(self, ticket: int, given: Any, results: Results) -> None:
        """Have `given` scored by the next free worker; never waits."""
        self._waiting.append((Job(ticket, given, results), 0))
        self._calls.wake()

    def close(self) -> None:
        """End the actors, whatever they are doing."""
        import ray

        self._is_closed = True
        self._calls.wake()
        if self._thread.ident:
            self._thread.join(_CLOSE_SECONDS)
        if self._local is not None:
            self._local.close()
        with contextlib.suppress(ray.exceptions.RayError):
            started = [node for node in self._nodes if node.has_started]
            closing = [_control(node.actor, "close") for node in started]
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_SECONDS)
            for node in self._nodes:
                ray.kill(node.actor)

    def _start(self, node: str, workers: int, failures_in_a_row: int = 0) -> _Node:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        config = self._config
        remote: Any = ray.remote
        body = remote(concurrency_groups={CONTROL: 1})(RewardActor)
        actor = body.options(
            num_cpus=workers,
            max_concurrency=_AHEAD * workers,
            # Soft: elsewhere, when its node is lost.
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
        ).remote(
            self._source,
            workers=workers,
            seconds=config.reward_timeout,
            memory_mb=config.reward_memory,
        )
        deadline = time.monotonic() + config.start_timeout
        started = _Node(node, workers, actor, deadline, failures_in_a_row)
        self._watch(actor.start.remote(), started, [])
        return started

    def _watch(self, call: Any, node: _Node, jobs: list[tuple[Job, int]]) -> None:
        self._asked[call] = node, jobs
        self._calls.add(call)

    # -- in the thread

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._hand_out()
                for call, ended in self._calls.take(_LOOK_SECONDS).items():
                    self._end(call, ended)
                self._replace_silent()
        except Exception as error:  # Ray is gone: whoever waits for a score must hear of it
            self._failure = CallFailure(f"no reward workers: {type(error).__name__}: {error}")
            while not self._is_closed:
                self._hand_out()
                time.sleep(_LOOK_SECONDS)

    def _hand_out(self) -> None:
        """Give waiting responses to the actors that have most room for their number of workers."""
        while self._waiting:
            if self._failure is not None or self._local is not None:
                job, _ = self._waiting.popleft()
                if self._local is not None:
                    self._local.enqueue(job.ticket, job.given, job.results)
                else:
                    assert self._failure is not None
                    job.results.done.put((job.ticket, self._failure))
                continue
            node = max(self._nodes, key=lambda one: one.room / one.workers)
            if node.room <= 0:
                return
            size = min(len(self._waiting), node.workers, node.room)
            taken = [self._waiting.popleft() for _ in range(size)]
            jobs = [(job, losses) for job, losses in taken if not job.results.dropped]
            if jobs:
                self._send(node, jobs)

    def _send(self, node: _Node, jobs: list[tuple[Job, int]]) -> None:
        try:
            call = node.actor.score.remote([job.given for job, _ in jobs])
        except Exception as error:  # what cannot be pickled costs itself
            if len(jobs) == 1:
                [(job, _)] = jobs
                reason = f"{type(error).__name__}: {error}"
                job.results.done.put((job.ticket, CallFailure(reason)))
                return
            for one in jobs:
                self._send(node, [one])
            return
        node.jobs += len(jobs)
        self._watch(call, node, jobs)

    def _end(self, call: Any, ended: Future[Any]) -> None:
        node, jobs = self._asked.pop(call, (None, []))
        if node is None or node not in self._nodes:  # its jobs wait again
            return
        try:
            answer = ended.result()
        except Exception as error:  # of Ray: the process, its node or the way to it is gone
            self._asked[call] = node, jobs
            self._replace(node, str(error).splitlines()[0])
            return
        if jobs:
            node.jobs -= len(jobs)
            node.failures_in_a_row = 0
            for (job, _), score in zip(jobs, answer, strict=True):
                job.results.done.put((job.ticket, score))
        elif answer is None:
            node.has_started = True
        else:
            self._give_up(node, answer.reason)

    def _replace_silent(self) -> None:
        started = [node for node in self._nodes if node.has_started]
        for node in self._heartbeat.silent(started):
            self._replace(node, "its process does not respond")
        for node in [n for n in self._nodes if not n.has_started]:
            if time.monotonic() <= node.deadline:
                continue
            node.deadline = math.inf
            if started:  # Ray starts it as soon as there is room
                self._console.warn(
                    f"{node.workers} reward workers did not start within "
                    f"{self._config.start_timeout:g} s: the cluster no longer has {node.workers} "
                    "CPUs for them; the job continues with the others"
                )
            else:
                self._give_up(node, f"no node has {node.workers} CPUs left for them")

    def _replace(self, node: _Node, reason: str) -> None:
        """Start another actor; responses of the old one go to whoever has room first."""
        lost = self._end_actor(node)
        failures = node.failures_in_a_row + 1
        if failures > self._config.max_restarts:
            self._give_up(node, reason)
            return
        self.restarts += 1
        self._console.warn(
            f"{node.workers} reward workers were lost ({reason}); {lost} responses are scored "
            "by others"
        )
        place = self._nodes.index(node)
        self._nodes[place] = self._start(node.node, node.workers, failures)

    def _end_actor(self, node: _Node) -> int:
        """Kill an actor; returns how many responses of it wait again."""
        import ray

        lost: list[tuple[Job, int]] = []
        for call, (owner, jobs) in list(self._asked.items()):
            if owner is node:
                del self._asked[call]
                lost += jobs
        for job, losses in reversed(lost):
            if losses + 1 < _MOST_LOSSES:
                self._waiting.appendleft((job, losses + 1))
            else:
                reason = f"{_MOST_LOSSES} actors that were to score it were lost"
                job.results.done.put((job.ticket, CallFailure(reason)))
        ray.kill(node.actor)
        return len(lost)

    def _give_up(self, node: _Node, reason: str) -> None:
        """Go on without the workers of a node, and on this machine if they were the last."""
        self._end_actor(node)
        self._nodes.remove(node)
        left = sum(one.workers for one in self._nodes)
        others = f"{left} others" if left else "workers on the driver's machine"
        self._console.warn(
            f"{node.workers} reward workers do not run ({reason}); the job goes on with {others}"
        )
        if not self._nodes:
            self._fall_back()

    def _fall_back(self) -> None:
        self._local = local_pool(self._source, self._config)


def _control(actor: Any, method: str) -> Any:
    return getattr(actor, method).options(concurrency_group=CONTROL).remote()


def _ping(node: _Node) -> Any:
    return _control(node.actor, "ping")
