"""What the driver spends on a batch per step, by samples, tokens and data parallel ranks.

    python -m benchmarks.batch_bench               # a part of `make bench-scale`
    python -m benchmarks.batch_bench --samples 1000 10000 --tokens 256 --ranks 8 64

From the engines' answers to two updates: batch, plan, log-probs of two policies, two mini-batches, by the job's own
functions. Ray and the ranks are simulated in this process: what is put is copied once, as into shared memory, and
forgotten, and ranks answer with log-probs of -1. So what is counted is the driver's own work and the bytes that it
puts and reads; what Ray's calls cost is in `scale_bench`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.measure import peak_extra_bytes
from plugin.batch_types import RolloutBatch
from plugin.cluster import trainer_group
from plugin.cluster.trainer_actor import RankPart, TrainedStep
from plugin.cluster.trainer_group import TrainerGroup
from plugin.config import JobConfig
from plugin.controller.batch import describe_batch, mini_batches, prepare_batch
from plugin.controller.passes import LogProbPasses
from plugin.environments.trajectory import Rollouts
from plugin.observe.console import Console
from plugin.ragged import Ragged

RESPONSES, MEGABYTE = 8, 1 << 20
_LENGTHS = ("total_lengths", "response_lengths")


class ObjectStore:
    """Takes objects for the price of a copy, and counts bytes; of a share it keeps the lengths."""

    def __init__(self) -> None:
        self._memory = np.zeros(1 << 24, np.uint8)
        self.put_bytes = self.read_bytes = 0

    def put(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """In place of `ray.put`; returns what stands for a reference."""
        for array in arrays.values():
            if not isinstance(array, np.ndarray):  # references: two numbers per sample
                self.put_bytes += 16 * len(array)
                continue
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self.put_bytes += flat.nbytes
            for start in range(0, flat.nbytes, len(self._memory)):
                part = flat[start : start + len(self._memory)]
                self._memory[: len(part)] = part
        return {name: np.array(arrays[name]) for name in _LENGTHS}

    def results(self, calls: list[Any], *_: Any, **__: Any) -> list[Any]:
        """In place of `wait_for_all`."""
        for result in calls:
            found = {"": result.log_probs} if isinstance(result, TrainedStep) else result or {}
            self.read_bytes += sum(a.nbytes for a in found.values() if a is not None)
        return calls


class Rank:
    """Answers at once with log-probs of -1 for the samples of a share."""

    def __init__(self) -> None:
        self.call = SimpleNamespace(remote=self._whole)
        self.call_apart = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._apart))

    def _whole(self, method: str, share: Mapping[str, Any], *arguments: Any) -> Any:
        values = np.full(share["response_lengths"].sum(), -1, np.float32)
        return (
            {arguments[1]: values} if method == "compute" else TrainedStep({}, None, values, None)
        )

    def _apart(self, method: str, *_: Any) -> tuple[Any, Any]:
        return None if method == "compute" else TrainedStep({}, None, None, None), object()


class SimulatedTrainer(TrainerGroup):
    """The job's trainer over ranks that answer at once."""

    def __init__(self, config: JobConfig, ranks: int) -> None:
        self._config, self._console, self._idle = config, Console(), None
        self._ranks = [Rank() for _ in range(ranks)]
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
    store, trainer = ObjectStore(), SimulatedTrainer(config, ranks)
    rollouts = rollouts_of(samples, tokens)
    put, wait = ray.put, trainer_group.wait_for_all
    ray.put, trainer_group.wait_for_all = store.put, store.results
    try:
        began = time.process_time()
        memory = peak_extra_bytes(lambda: one_step(config, trainer, rollouts))
        seconds = time.process_time() - began
    finally:
        ray.put, trainer_group.wait_for_all = put, wait
    return {
        "seconds": seconds,
        "memory": memory / MEGABYTE,
        "put": store.put_bytes / MEGABYTE,
        "read": store.read_bytes / MEGABYTE,
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
        "| samples x tokens | ranks | processor | peak memory | put | read |\n|---|---|---|---|---|---|"
    )
    for samples, tokens, ranks in itertools.product(options.samples, options.tokens, options.ranks):
        if samples * tokens > options.most:
            continue
        row = measure(samples, tokens, ranks)
        print(
            f"| {samples:,} x {tokens:,} | {ranks} | {row['seconds']:.2f} s | {row['memory']:.0f} MB "
            f"| {row['put']:.0f} MB | {row['read']:.0f} MB |",
            flush=True,
        )


if __name__ == "__main__":
    main()
