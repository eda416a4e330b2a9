"""What the driver spends on a batch per step, by samples, tokens and data parallel ranks.

    python -m benchmarks.batch_bench               # a part of `make bench-scale`
    python -m benchmarks.batch_bench --samples 1000 10000 --tokens 256 --ranks 8 64

From the engines' answers to two updates: batch, plan, log-probs of two policies, two mini-batches. The job's own
functions on a real Ray; ranks are simulated: a few actors answer for all of them with log-probs of -1.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.measure import peak_extra_bytes
from plugin.batch_types import RolloutBatch
from plugin.cluster import trainer_group
from plugin.cluster.array_transport import to_arrays
from plugin.cluster.ray_cluster import cluster
from plugin.cluster.remote_calls import Messages, Reported
from plugin.cluster.trainer_actor import RankPart, TrainedStep
from plugin.cluster.trainer_group import TrainerGroup
from plugin.config import JobConfig
from plugin.controller.batch import describe_batch, mini_batches, prepare_batch
from plugin.controller.passes import LogProbPasses
from plugin.environments.trajectory import Rollouts
from plugin.observe.console import Console
from plugin.ragged import Ragged

HOSTS, RESPONSES, MEGABYTE = 2, 8, 1 << 20
_LENGTHS = ("total_lengths", "response_lengths")


class Host:
    """Answers for many trainer ranks: log-probs of -1 for the samples of a share."""

    def call(self, method: str, share: Mapping[str, Any], *arguments: Any) -> Reported:
        """Everything in one object."""
        values = np.full(share["response_lengths"].sum(), -1, np.float32)
        if method == "compute":
            return Reported({arguments[1]: values}, Messages([], []))
        return Reported(TrainedStep({}, None, values, None), Messages([], []))

    def call_apart(self, method: str, share: Mapping[str, Any], *arguments: Any) -> tuple[Any, Any]:
        """The results in an object of their own."""
        values = np.full(share["response_lengths"].sum(), -1, np.float32)
        column = arguments[2] if method == "compute" else "log_probs"
        head = None if method == "compute" else TrainedStep({}, None, None, None)
        part = {**{name: share[name] for name in _LENGTHS}, column: values}
        return Reported(head, Messages([], [])), part


class SimulatedTrainer(TrainerGroup):
    """The job's trainer over ranks that hosts simulate."""

    def __init__(self, config: JobConfig, ranks: int) -> None:
        import ray

        hosts = [ray.remote(Host).options(num_cpus=0).remote() for _ in range(HOSTS)]
        self.hosts = hosts
        self._config, self._console, self._idle = config, Console(), None
        self._ranks = [hosts[rank % HOSTS] for rank in range(ranks)]
        self._parts = [RankPart(rank, True) for rank in range(ranks)]
        self.places = [SimpleNamespace(address="here") for _ in range(ranks)]  # type: ignore[misc]
        sizes = {"hidden_size": 4096, "max_position_embeddings": 1 << 20}
        self._built = {"policy": SimpleNamespace(hf_config=sizes)}  # type: ignore[dict-item]
        self._fewest_microbatches = 1
        self._plans: dict[bytes, Any] = {}


def rollouts_of(samples: int, tokens: int) -> Rollouts:
    """Groups of 8 responses of `tokens` random tokens, give or take a half, as engines' answers joined."""
    draw = np.random.default_rng(0)
    responses = draw.integers(tokens // 2, tokens * 3 // 2, samples)
    totals, count = responses + 32, int(responses.sum())
    batch = RolloutBatch(
        {
            "unconcat_tokens": Ragged(torch.randint(50_000, (int(totals.sum()),)), totals),
            "total_lengths": totals,
            "response_lengths": responses,
            "loss_masks": Ragged(torch.ones(count, dtype=torch.int64), responses),
            "rollout_log_probs": Ragged(-torch.rand(count), responses),
            "weight_versions": Ragged(torch.zeros(count, dtype=torch.int64), responses),
        }
    )
    ones = np.ones(samples, np.int64)
    rewards = draw.random(samples)
    groups = np.arange(samples) // RESPONSES
    return Rollouts(batch, groups, ones, rewards, np.full(samples, ""), ones, ones < 1)


@contextmanager
def counted_bytes() -> Iterator[dict[str, int]]:
    """What the driver puts into the object store, and reads of the results of ranks."""
    import ray

    found = {"put": 0, "read": 0}
    put, wait = ray.put, trainer_group.wait_for_all

    def counting_put(value: Any) -> Any:
        found["put"] += _bytes_of(value)
        return put(value)

    def counting_wait(*arguments: Any, **options: Any) -> list[Any]:
        results = wait(*arguments, **options)
        found["read"] += sum(map(_bytes_of, results))
        return results

    ray.put, trainer_group.wait_for_all = counting_put, counting_wait
    try:
        yield found
    finally:
        ray.put, trainer_group.wait_for_all = put, wait


def _bytes_of(value: Any) -> int:
    if isinstance(value, TrainedStep):
        value = {"log_probs": value.log_probs}
    arrays = value.values() if isinstance(value, Mapping) else ()
    # A column that is elsewhere is two numbers per sample.
    return sum(
        array.nbytes if isinstance(array, np.ndarray) else 16 * len(array)
        for array in arrays
        if array is not None
    )


def one_step(config: JobConfig, trainer: SimulatedTrainer, rollouts: Rollouts) -> None:
    """What the training loop does with a rollout."""
    batch = prepare_batch(config, rollouts)
    describe_batch(config, batch, rollouts, 0)
    updates = mini_batches(config, rollouts, 0)
    if hasattr(trainer, "stored"):  # so that the script also measures what was before
        samples = [update.samples for update in updates if update.epoch == 0]
        batch = trainer.stored(batch, samples)
    parts: Any = SimpleNamespace(reference=object())
    batch, _ = LogProbPasses(config, parts, trainer).added_to(batch, updates)
    for number, update in enumerate(updates):
        trainer.train(update.of(batch), 0, number / len(updates), 1e-6)


def measure(samples: int, tokens: int, ranks: int) -> dict[str, float]:
    """Processor seconds of the driver, its peak memory, and the bytes that pass through it."""
    import ray

    config = JobConfig(
        rollout_batch_size=samples // RESPONSES,
        n_samples_per_prompt=RESPONSES,
        global_batch_size=samples // 2,
        max_tokens_per_gpu=max(4096, 4 * tokens),
        use_tis=True,
    )
    trainer = SimulatedTrainer(config, ranks)
    one_step(config, trainer, rollouts_of(ranks * RESPONSES, 16))  # starts what later ones have
    rollouts = rollouts_of(samples, tokens)
    size = sum(array.nbytes for array in to_arrays(rollouts).values())
    with counted_bytes() as passed:
        thread, process = time.thread_time(), time.process_time()
        memory = peak_extra_bytes(lambda: one_step(config, trainer, rollouts))
        thread, process = time.thread_time() - thread, time.process_time() - process
    for host in trainer.hosts:
        ray.kill(host)
    return {
        "thread": thread,
        "process": process,
        "memory": memory / MEGABYTE,
        "answers": size / MEGABYTE,
        "put": passed["put"] / MEGABYTE,
        "read": passed["read"] / MEGABYTE,
    }


def main(arguments: list[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--samples", type=int, nargs="*", default=[1000, 10_000, 100_000])
    parser.add_argument("--tokens", type=int, nargs="*", default=[64, 512])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--most", type=float, default=2e7, help="leave out batches of more tokens")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    print(
        "| samples x tokens | ranks | answers | driver's thread | with Ray's | peak memory | put | read |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    with cluster(JobConfig()) as connected:
        connected()
        cases = itertools.product(options.samples, options.tokens, options.ranks)
        for samples, tokens, ranks in cases:
            if samples * tokens > options.most:
                continue
            row = measure(samples, tokens, ranks)
            print(
                f"| {samples:,} x {tokens:,} | {ranks} | {row['answers']:.0f} MB | {row['thread']:.2f} s "
                f"| {row['process']:.2f} s | {row['memory']:.0f} MB | {row['put']:.0f} MB "
                f"| {row['read']:.0f} MB |",
                flush=True,
            )


if __name__ == "__main__":
    main()
