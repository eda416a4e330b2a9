"""Where each millisecond of a training step goes at the quick start's size: `python -m benchmarks.microbatch_profile`.

512 samples of 8 to 13 tokens in microbatches of 64, one rank, one thread, CPU seconds: the sizes at which fixed costs
show. Prints a Markdown table of the least milliseconds per microbatch of several steps.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from plugin.batch_types import RolloutBatch, RolloutSample

SAMPLES, MICROBATCH, STEPS = 512, 64, 8
PARTS = ("preparing", "model forward", "model backward", "loss and metrics", "optimizer", "rest")


def main() -> None:
    """Measure and print."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    spent: defaultdict[str, float] = defaultdict(float)
    trainer = _trainer()
    _watch(spent)
    batch = _batch(trainer.hf_config.vocab_size)
    trainer.train_step(batch, with_log_probs=True)
    least: dict[str, float] = {}
    for _ in range(STEPS):
        spent.clear()
        start = time.process_time()
        trainer.train_step(batch, with_log_probs=True)
        spent["rest"] = time.process_time() - start - sum(spent.values())
        for part in PARTS:
            least[part] = min(least.get(part, float("inf")), spent[part])
    count = SAMPLES / MICROBATCH
    print("| part | ms per microbatch |\n|---|---|")
    for part in PARTS:
        print(f"| {part} | {1000 * least[part] / count:.1f} |")
    print(f"| all | {1000 * sum(least.values()) / count:.1f} |")


def _trainer() -> Any:
    from plugin.cluster.model_source import policy_source
    from plugin.config import JobConfig
    from plugin.megatron_backend.parallel_groups import init_parallel
    from plugin.megatron_backend.trainer import MegatronTrainer

    config = JobConfig.from_sources({"micro_batch_size": MICROBATCH})
    groups = init_parallel(0, 1, init_method=f"file://{tempfile.mkdtemp()}/rendezvous")
    model = policy_source(config).as_config()
    return MegatronTrainer(config, model, groups, layout="padded")


def _batch(vocabulary: int) -> RolloutBatch:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in range(SAMPLES):
        length = 2 + number % 6
        tokens = torch.randint(0, vocabulary, (6 + length,), generator=generator)
        samples.append(
            RolloutSample(
                tokens,
                length,
                torch.ones(length, dtype=torch.int64),
                group_index=number // 8,
                rollout_log_probs=torch.full((length,), -2.5),
            )
        )
    batch = RolloutBatch.from_samples(samples)
    advantages = [torch.full((s.response_length,), i % 3 - 1.0) for i, s in enumerate(samples)]
    return batch.with_column("advantages", advantages)


def _watch(spent: dict[str, float]) -> None:
    """Add up the CPU seconds of the parts of a step, from outside."""
    from megatron.core.pipeline_parallel import schedules

    from plugin.megatron_backend import trainer
    from plugin.megatron_backend.step import forward_step, microbatch_loss, schedule

    def timed(owner: Any, name: str, part: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[part] += time.process_time() - start

        setattr(owner, name, call)

    timed(trainer.MegatronTrainer, "_prepared", "preparing")
    timed(forward_step, "run_model", "model forward")
    timed(schedules, "backward_step", "model backward")
    timed(microbatch_loss.TrainingLoss, "inside_lm_head", "loss and metrics")
    timed(schedule.GuardedOptimizer, "step", "optimizer")


if __name__ == "__main__":
    main()
