"""What the driver spends on a batch per step, by samples, tokens and data parallel ranks.

    python -m benchmarks.batch_bench               # a part of `make bench-scale`
    python -m benchmarks.batch_bench --samples 1000 10000 --tokens 256 --ranks 8 64 --routes
    python -m benchmarks.batch_bench --samples --plan 1000000    # microbatches of so many samples alone

From the engines' answers to two updates: batch, plan, log-probs of two policies, two mini-batches and what the
detectors read of each, by the job's own functions. Ray and the ranks are simulated in this process: what is put is
copied once, as into shared memory, and forgotten, and ranks answer with log-probs of -1. So what is counted is the
driver's own work and the bytes that it puts and reads; what Ray's calls cost is in `scale_bench`. Routes stay where
they are: the driver has references.
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
from plugin.cluster import array_transport, trainer_group
from plugin.cluster.trainer_actor import RankPart, TrainedStep
from plugin.cluster.trainer_group import TrainerGroup
from plugin.config import JobConfig
from plugin.controller.batch import (
    describe_batch,
    first_epoch,
    mini_batches,
    prepare_batch,
)
from plugin.controller.passes import LogProbPasses
from plugin.controller.step_records import seen_columns
from plugin.environments.trajectory import Rollouts
from plugin.megatron_backend.step.microbatching import BatchingLimits, plan_microbatches
from plugin.observe.console import Console
from plugin.ragged import Ragged, Stored

RESPONSES, MEGABYTE = 8, 1 << 20
#: Of a share: what a rank needs to answer.
_KEPT = ("total_lengths", "response_lengths", "/samples")
#: Of the samples that detectors look at, per token.
_SEEN = {
    "loss_masks": np.uint8,
    "rollout_log_probs": np.float32,
    "advantages": np.float32,
    "weight_versions": np.int64,
    "log_probs": np.float32,
    "ref_log_probs": np.float32,
}


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
        return {name: np.array(arrays[name]) for name in _KEPT if name in arrays}

    def get(self, references: list[Any]) -> list[Any]:
        """In place of `ray.get`: the arrays themselves stand for their references."""
        self.read_bytes += sum(a.nbytes for arrays in references for a in arrays.values())
        return references


class Rank:
    """Answers at once, with log-probs of -1 where detectors look at them."""

    def __init__(self) -> None:
        self.call = SimpleNamespace(remote=lambda *_: None)
        self.call_apart = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._apart))

    def _apart(self, method: str, share: Mapping[str, Any], *arguments: Any) -> tuple[Any, Any]:
        if method == "compute":
            return None, {}
        chosen = np.flatnonzero(share["/samples"] % arguments[-1] == 0)
        totals, responses = (share[name][chosen] for name in _KEPT[:2])
        arrays = {name: np.full(responses.sum(), -1).astype(dtype) for name, dtype in _SEEN.items()}
        arrays["unconcat_tokens"] = np.ones(totals.sum(), np.int32)
        arrays |= {"total_lengths": totals, "response_lengths": responses}
        return TrainedStep({}, None, None), arrays


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


def rollouts_of(samples: int, tokens: int, *, routes: bool) -> Rollouts:
    """Groups of 8 responses of `tokens` random tokens, give or take a half, as engines' answers joined.

    routes: each of them is in an object of its own
    """
    draw = np.random.default_rng(0)
    responses = draw.integers(tokens // 2, tokens * 3 // 2, samples)
    totals, count = responses + 32, int(responses.sum())
    ids = torch.randint(50_000, (int(totals.sum()),), dtype=torch.int32)
    columns: dict[str, Any] = {
        "unconcat_tokens": Ragged(ids, totals),
        "total_lengths": totals,
        "response_lengths": responses,
        "loss_masks": Ragged(torch.ones(count, dtype=torch.uint8), responses),
        "rollout_log_probs": Ragged(-torch.rand(count), responses),
        "weight_versions": Ragged(torch.zeros(count, dtype=torch.int64), responses),
    }
    if routes:
        places = np.arange(samples)
        columns["rollout_routed_experts"] = Stored([object()] * samples, places, places * 0)
    batch = RolloutBatch(columns)
    ones = np.ones(samples, np.int64)
    rewards = draw.random(samples)
    groups = np.arange(samples) // RESPONSES
    return Rollouts(batch, groups, ones, rewards, np.full(samples, ""), ones, ones < 1)


def one_step(config: JobConfig, trainer: SimulatedTrainer, rollouts: Rollouts) -> None:
    """What the training loop does with a rollout."""
    batch = prepare_batch(config, rollouts)
    describe_batch(config, batch, rollouts, 0)
    updates = mini_batches(config, rollouts, 0)
    batch = trainer.stored(batch, first_epoch(updates))
    parts: Any = SimpleNamespace(reference=object())
    batch, _ = LogProbPasses(config, parts, trainer).added_to(batch, updates)
    for number, update in enumerate(updates):
        trained = trainer.train(update.of(batch), 0, number / len(updates), 1e-6)
        seen_columns(batch, trained)


def measure(samples: int, tokens: int, ranks: int, *, routes: bool = False) -> dict[str, float]:
    """Processor seconds of the driver, its peak memory, and the bytes that pass through it."""
    import ray

    config = JobConfig(
        rollout_batch_size=samples // RESPONSES,
        n_samples_per_prompt=RESPONSES,
        global_batch_size=samples // 2,
        max_tokens_per_gpu=max(4096, 4 * tokens),
        use_tis=True,
        use_rollout_routing_replay="ids" if routes else False,
    )
    store, trainer = ObjectStore(), SimulatedTrainer(config, ranks)
    rollouts = rollouts_of(samples, tokens, routes=routes)
    put, get, wait = ray.put, array_transport._of_ray, trainer_group.wait_for_all
    ray.put, array_transport._of_ray = store.put, store.get
    trainer_group.wait_for_all = lambda calls, *_, **__: list(calls)
    try:
        began = time.process_time()
        memory = peak_extra_bytes(lambda: one_step(config, trainer, rollouts))
        seconds = time.process_time() - began
    finally:
        ray.put, array_transport._of_ray, trainer_group.wait_for_all = put, get, wait
    return {
        "seconds": seconds,
        "memory": memory / MEGABYTE,
        "put": store.put_bytes / MEGABYTE,
        "read": store.read_bytes / MEGABYTE,
    }


def plan_seconds(samples: int, ranks: int) -> float:
    """Processor seconds to plan the microbatches of samples of 50 to 4,000 tokens."""
    lengths = np.random.default_rng(0).integers(50, 4000, samples)
    began = time.process_time()
    plan_microbatches(lengths, BatchingLimits(max_tokens=16_384), dp_size=ranks)
    return time.process_time() - began


def main(arguments: list[str] | None = None) -> None:
    """Print two tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--samples", type=int, nargs="*", default=[1000, 10_000, 100_000])
    parser.add_argument("--tokens", type=int, nargs="*", default=[64, 512])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--routes", action="store_true", help="answers have routes")
    parser.add_argument("--plan", type=int, nargs="*", default=[1_000_000])
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
        row = measure(samples, tokens, ranks, routes=options.routes)
        print(
            f"| {samples:,} x {tokens:,} | {ranks} | {row['seconds']:.2f} s | {row['memory']:.0f} MB "
            f"| {row['put']:.0f} MB | {row['read']:.0f} MB |",
            flush=True,
        )
    print("\n| samples planned | ranks | processor |\n|---|---|---|")
    for samples, ranks in itertools.product(options.plan, options.ranks):
        print(f"| {samples:,} | {ranks} | {plan_seconds(samples, ranks):.2f} s |", flush=True)


if __name__ == "__main__":
    main()
