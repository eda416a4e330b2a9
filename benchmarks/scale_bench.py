"""What the driver spends per step, by engines and ranks: its processor time, its memory, the bytes it receives.

    python -m benchmarks.scale_bench               # what `make bench-scale` runs
    python -m benchmarks.scale_bench --engines 256 --ranks 512

Queue, pool and remote calls are the job's own, and every call is a real Ray call. The engines and ranks behind them
are simulated: a few asynchronous actors answer for all of them, after a wait, with responses of random tokens. So
the driver sees the calls, the references and the results of a large job, and the machine carries no models.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch

from benchmarks.measure import peak_extra_bytes
from plugin.batch_types import RolloutSample
from plugin.cluster.array_transport import to_arrays
from plugin.cluster.engine_pool import EnginePool, _Running
from plugin.cluster.ray_cluster import cluster
from plugin.cluster.remote_calls import Messages, Reported, wait_for_all
from plugin.config import JobConfig
from plugin.controller.queue.rollout_queue import RolloutQueue
from plugin.engines.protocol import EngineHealth, GenerationRequest, SamplingParameters
from plugin.environments.trajectory import Rollouts, Trajectory
from plugin.observe.console import Console
from plugin.tasks.copy_digits import ALPHABET, CharacterTokenizer, CopyDigitsTask

HOSTS = 4
#: Trainer calls per step: log-probs of two policies, and the update.
CALLS = 3
TOKENS, RESPONSES, GROUPS_PER_ENGINE = 64, 8, 2
#: A trainer call; a response.
CALL_SECONDS, RESPONSE_SECONDS = 2.0, (1.0, 6.0)
MEGABYTE = 1 << 20


class Host:
    """Answers for many engines and ranks in one process, as `EngineActor` and `TrainerRank` do."""

    def __init__(self) -> None:
        self._done: dict[int, list[tuple[int, int]]] = {}
        self._changed: dict[int, asyncio.Event] = {}
        self._version, self._hangs = 0, False

    async def hang(self) -> None:
        """Begin no further response: engines are busy and have nothing to say."""
        self._hangs = True

    async def call(self, number: int, method: str, *arguments: Any) -> Reported:
        """The answer of engine or rank `number`."""
        return Reported(await getattr(self, method)(number, *arguments), Messages([], []))

    async def call_apart(self, number: int, method: str, *arguments: Any) -> tuple[Any, Any]:
        """As `call`, with a part for what the driver does not read: there is none."""
        return await self.call(number, method, *arguments), {}

    async def health(self, number: int) -> EngineHealth:
        return EngineHealth(f"engine {number}", self._version, 0)

    async def work(self, number: int, seconds: float) -> None:
        """A trainer rank's part of a call."""
        await asyncio.sleep(seconds)

    async def load_weights(self, number: int, version: int, *_: Any) -> list[Any]:
        self._version = version
        return []

    async def submit(self, number: int, requests: Mapping[int, GenerationRequest], *_: Any) -> None:
        for group in () if self._hangs else requests:
            self._spawn(self._generate(number, group, self._version))

    def _spawn(self, generation: Any) -> None:
        task = asyncio.ensure_future(generation)
        self.__dict__.setdefault("_tasks", set()).add(task)
        task.add_done_callback(self.__dict__["_tasks"].discard)

    async def _generate(self, number: int, group: int, version: int) -> None:
        await asyncio.sleep(random.uniform(*RESPONSE_SECONDS))
        self._done.setdefault(number, []).append((group, version))
        self._changed.setdefault(number, asyncio.Event()).set()

    async def collect(self, number: int, era: int) -> Any:
        changed = self._changed.setdefault(number, asyncio.Event())
        await changed.wait()
        changed.clear()
        done = self._done.pop(number)
        answers = [_responses(version) for _, version in done]
        return to_arrays(Rollouts.of(answers, [group for group, _ in done]))


def _responses(version: int) -> list[Trajectory]:
    """A group's responses of random tokens."""
    samples = [
        RolloutSample(
            torch.randint(len(ALPHABET), (TOKENS + 8,)),
            TOKENS,
            torch.ones(TOKENS),
            rollout_log_probs=-torch.rand(TOKENS),
            weight_version=version,
        )
        for _ in range(RESPONSES)
    ]
    return [Trajectory((sample,), float(i)) for i, sample in enumerate(samples)]


class Handle:
    """An actor's handle whose calls the host makes in the name of engine or rank `number`."""

    def __init__(self, host: Any, number: int, returns: int = 1) -> None:
        self._host, self._number, self._returns = host, number, returns
        self.call = self.call_apart = self

    def options(self, num_returns: int = 1, **_: Any) -> Handle:
        return Handle(self._host, self._number, num_returns)

    def remote(self, method: str, *arguments: Any) -> Any:
        if self._returns == 1:
            return self._host.call.remote(self._number, method, *arguments)
        call = self._host.call_apart.options(num_returns=self._returns)
        return call.remote(self._number, method, *arguments)


class SimulatedPool(EnginePool):
    """The job's pool over engines that hosts simulate."""

    hosts: Sequence[Any] = ()

    def _start(self, number: int, failures_in_a_row: int = 0) -> _Running:
        actor = Handle(self.hosts[number % len(self.hosts)], number)
        return _Running(actor, actor.remote("health"), time.monotonic() + 300, failures_in_a_row)


@dataclass
class Spent:
    """What the driver spent: in its own thread, and with Ray's threads."""

    thread: float = 0.0
    process: float = 0.0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        thread, process = time.thread_time(), time.process_time()
        yield
        self.thread += time.thread_time() - thread
        self.process += time.process_time() - process


def measure(engines: int, ranks: int, steps: int) -> dict[str, float]:
    """One job of so many engines and ranks: processor seconds per step, peak memory, bytes received."""
    import ray

    actor = ray.remote(Host).options(max_concurrency=10_000, num_cpus=0)
    hosts = [actor.remote() for _ in range(HOSTS)]
    config = JobConfig(
        num_rollout_engines=engines,
        rollout_batch_size=GROUPS_PER_ENGINE * engines,
        n_samples_per_prompt=RESPONSES,
        async_rollouts=True,
        use_tis=True,
        weight_sync="object-store",
        verify_weights="off",
    )
    SimulatedPool.hosts = hosts
    console = Console()
    plan: Any = SimpleNamespace(fewest_engines=None)
    pool = SimulatedPool(config, {}, plan, cast(Any, None), console)
    pool.wait_until_ready()
    task = CopyDigitsTask(CharacterTokenizer(ALPHABET), seed=1)
    queue = RolloutQueue(task, pool, SamplingParameters(max_response_length=TOKENS), config)
    ranks_ = [Handle(hosts[rank % HOSTS], rank) for rank in range(ranks)]
    names = [f"rank {rank}" for rank in range(ranks)]
    parts = {name: Spent() for name in ("take", "trainer", "weights", "idle")}
    received = 0

    def step(version: int) -> None:
        nonlocal received
        with parts["take"].counted():
            groups = queue.take(version)
        received += sum(
            _bytes_of(rollouts) for rollouts in {id(g): g.rollouts for g in groups}.values()
        )
        with parts["trainer"].counted():
            for _ in range(CALLS):
                calls = [r.remote("work", CALL_SECONDS * random.uniform(0.5, 1)) for r in ranks_]
                wait_for_all(calls, names, console, timeout=300, while_waiting=queue.pump)
        with parts["weights"].counted():
            pool.begin_version(version + 1)
            pool.send_weights([ray.put(b"")])
            pool.finish_loads()

    step(0)  # the first step starts what later ones have
    for part in parts.values():
        part.thread = part.process = 0.0
    received = 0
    memory = peak_extra_bytes(lambda: [step(version) for version in range(1, steps + 1)])
    ray.get([host.hang.remote() for host in hosts])
    queue.take(steps + 1)
    queue.pump()
    with parts["idle"].counted():
        for _ in range(20):
            queue.pump()
    for host in hosts:
        ray.kill(host)
    idle = parts.pop("idle")
    return {
        "engines": engines,
        "ranks": ranks,
        **{f"{name}_seconds": part.thread / steps for name, part in parts.items()},
        "thread_seconds": sum(part.thread for part in parts.values()) / steps,
        "process_seconds": sum(part.process for part in parts.values()) / steps,
        "idle_pump_ms": 1000 * idle.thread / 20,
        "memory_mb": memory / MEGABYTE,
        "received_mb": received / steps / MEGABYTE,
    }


def _bytes_of(rollouts: Any) -> int:
    return sum(array.nbytes for array in to_arrays(rollouts).values())


def main(arguments: list[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--engines", type=int, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 32, 128, 512])
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(
        "| engines | ranks | take | trainer calls | weights | driver's thread | with Ray's | idle pump | peak memory | "
        "received |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    with cluster(JobConfig()) as connected:
        connected()
        for engines, ranks in zip(options.engines, options.ranks, strict=True):
            row = measure(engines, ranks, options.steps)
            print(
                f"| {engines} | {ranks} | {row['take_seconds']:.3f} s | {row['trainer_seconds']:.3f} s "
                f"| {row['weights_seconds']:.3f} s | {row['thread_seconds']:.3f} s "
                f"| {row['process_seconds']:.3f} s | {row['idle_pump_ms']:.2f} ms "
                f"| {row['memory_mb']:.0f} MB | {row['received_mb']:.2f} MB |",
                flush=True,
            )


if __name__ == "__main__":
    main()
