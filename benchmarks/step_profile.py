"""Where each second of a training step goes: `python -m benchmarks.step_profile [--hf-checkpoint DIR]`.

One rank. Without a checkpoint the quick start's model and batch, the size at which fixed costs show; with one, samples
of its vocabulary, and transformers' forward and backward of the same tokens beside it, in turns. Prints Markdown: the
least seconds of the parts of several steps, and the operators of one more step by their own time. With `--run-dir`
nothing runs: the table is of the whole steps of that job, as it recorded them, driver and transport included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from plugin.batch_types import RolloutBatch, RolloutSample

PARTS = ("preparing", "model forward", "model backward", "loss and metrics", "optimizer", "rest")
#: Operators by what they are for; the first that is part of a name counts.
OPERATORS = {
    "attention": ("scaled_dot_product",),
    "matrix products": ("mm", "linear", "matmul", "bmm"),
    "moving data": ("copy_", "cat", "index", "fill_", "zero", "to_copy", "clone", "embedding"),
    "norms, activations, residuals": ("",),
}

#: Phases of a job's step on the driver, by the metric that records them.
PHASES = {
    "seconds_waiting": "waiting for responses (ranks idle)",
    "seconds_preparing": "driver: preparing the batch",
    "seconds_log_probs": "log-prob passes, transport to the ranks included",
    "seconds_training": "update",
    "seconds_transport": "the batch to the ranks, and results back",
    "seconds_values": "value pass",
    "seconds_critic": "update of the critic",
}


def main() -> None:
    """Measure and print."""
    options = _options()
    if options.run_dir is not None:
        print(job_table((options.run_dir / "metrics.jsonl").read_text()))
        return
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    trainer = _trainer(options)
    batch = _batch(trainer.hf_config.vocab_size, options)
    spent: defaultdict[str, float] = defaultdict(float)
    _watch(spent)
    trainer.train_step(batch, with_log_probs=True)
    peer = None if options.hf_checkpoint is None else _transformers_pass(options, batch)
    least: dict[str, float] = {}
    steps, peers = [], []
    for _ in range(options.steps):
        spent.clear()
        start = time.perf_counter()
        trainer.train_step(batch, with_log_probs=True)
        steps.append(time.perf_counter() - start)
        spent["rest"] = steps[-1] - sum(spent.values())
        for part in PARTS:
            least[part] = min(least.get(part, float("inf")), spent[part])
        if peer is not None:
            start = time.perf_counter()
            peer()
            peers.append(time.perf_counter() - start)
    print("| part | seconds |\n|---|---|")
    for part in PARTS:
        print(f"| {part} | {least[part]:.3f} |")
    print(f"| whole step | {min(steps):.3f} |")
    if peers:
        print(f"| transformers, forward and backward alone | {min(peers):.3f} |")
        print(f"| ratio | {min(steps) / min(peers):.2f} |")
    _print_operators(lambda: trainer.train_step(batch, with_log_probs=True))


def job_table(metrics: str) -> str:
    """Markdown: medians over the steps of a job's metrics.jsonl but the first, which starts up."""
    steps = [json.loads(line) for line in metrics.splitlines()]
    steps = [step for step in steps[1:] or steps if "seconds" in step]
    for step in steps:  # recorded as a part of the update
        step["seconds_training"] -= step.get("seconds_transport", 0.0)
    rows = {
        label: statistics.median(step.get(name, 0.0) for step in steps)
        for name, label in PHASES.items()
        if any(name in step for step in steps)
    }
    rows["driver: the rest"] = statistics.median(
        step["seconds"] - sum(step.get(name, 0.0) for name in PHASES) for step in steps
    )
    rows["**whole step**"] = statistics.median(step["seconds"] for step in steps)
    sync = statistics.median(step.get("seconds_weight_sync", 0.0) for step in steps)
    rows["weight sync before it (engines idle)"] = sync
    lines = [f"| {label} | {seconds:.3f} |" for label, seconds in rows.items()]
    return "\n".join(["| part | seconds |", "|---|---|", *lines])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hf-checkpoint", help="model directory; none = the quick start's model")
    parser.add_argument(
        "--samples", type=int, default=None, help="64, or 512 at the quick start's size"
    )
    parser.add_argument("--tokens", type=int, default=67, help="mean tokens of a sample")
    parser.add_argument("--max-tokens-per-gpu", type=int, help="token budget; none = auto")
    parser.add_argument("--train-dtype", default="float32")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--use-tis", action="store_true")
    parser.add_argument("--run-dir", type=Path, help="of a job: show its recorded steps instead")
    options = parser.parse_args()
    if options.samples is None:
        options.samples = 512 if options.hf_checkpoint is None else 64
    return options


def _trainer(options: argparse.Namespace) -> Any:
    from plugin.cluster.model_source import policy_source
    from plugin.config import JobConfig
    from plugin.megatron_backend.parallel_groups import init_parallel
    from plugin.megatron_backend.step.sequence_packing import sequence_layout
    from plugin.megatron_backend.trainer import MegatronTrainer

    flags: dict[str, Any] = {"train_dtype": options.train_dtype, "use_tis": options.use_tis}
    if options.hf_checkpoint is None:
        flags["micro_batch_size"] = 64
    else:
        flags |= {"hf_checkpoint": options.hf_checkpoint}
        if options.max_tokens_per_gpu is not None:
            flags["max_tokens_per_gpu"] = options.max_tokens_per_gpu
    config = JobConfig.from_sources(flags)
    groups = init_parallel(0, 1, init_method=f"file://{tempfile.mkdtemp()}/rendezvous")
    source = policy_source(config)
    layout = sequence_layout(config, transformer_engine=False)
    trainer = MegatronTrainer(config, source.as_config(), groups, layout=layout)
    if options.hf_checkpoint is not None:
        trainer.load_hf_weights(options.hf_checkpoint)
    return trainer


def _batch(vocabulary: int, options: argparse.Namespace) -> RolloutBatch:
    """Responses of a third of each sample; lengths from 0.8 to 1.2 times the mean."""
    generator = torch.Generator().manual_seed(0)
    mean = options.tokens if options.hf_checkpoint else 10
    samples = []
    for number in range(options.samples):
        total = round(mean * (0.8 + 0.4 * (number % 7) / 6))
        response = max(1, total // 3)
        samples.append(
            RolloutSample(
                torch.randint(0, vocabulary, (total,), generator=generator),
                response,
                torch.ones(response, dtype=torch.int64),
                group_index=number // 8,
                rollout_log_probs=torch.full((response,), -2.5),
            )
        )
    batch = RolloutBatch.from_samples(samples)
    advantages = [torch.full((s.response_length,), i % 3 - 1.0) for i, s in enumerate(samples)]
    return batch.with_column("advantages", advantages)


def _transformers_pass(options: argparse.Namespace, batch: RolloutBatch) -> Callable[[], None]:
    """Forward and backward of the same samples, padded, 8 at a time, their log-probs as the loss."""
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, options.train_dtype)
    model = AutoModelForCausalLM.from_pretrained(options.hf_checkpoint, dtype=dtype)
    model.train()
    tokens = sorted(batch.columns["unconcat_tokens"], key=len)
    parts = [tokens[start : start + 8] for start in range(0, len(tokens), 8)]

    def run() -> None:
        model.zero_grad()
        for part in parts:
            rows = pad_sequence(list(part), batch_first=True)
            mask = pad_sequence([torch.ones_like(t) for t in part], batch_first=True)
            logits = model(rows, attention_mask=mask).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), rows[:, 1:].flatten()
            )
            loss.backward()

    return run


def _watch(spent: dict[str, float]) -> None:
    """Add up the seconds of the parts of a step, from outside."""
    from megatron.core.pipeline_parallel import schedules

    from plugin.megatron_backend import trainer
    from plugin.megatron_backend.step import microbatch_loss, optimizer_step, schedule

    def timed(owner: Any, name: str, part: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[part] += time.perf_counter() - start

        setattr(owner, name, call)

    timed(trainer.MegatronTrainer, "_prepared", "preparing")
    timed(schedule, "run_model", "model forward")
    timed(schedules, "backward_step", "model backward")
    timed(microbatch_loss.TrainingLoss, "inside_lm_head", "loss and metrics")
    timed(optimizer_step.GuardedOptimizer, "step", "optimizer")


def _print_operators(step: Callable[[], Any]) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    seconds: defaultdict[str, float] = defaultdict(float)
    for event in found.key_averages():
        if event.key.startswith(("aten::", "mkldnn::")):
            kind = next(k for k, names in OPERATORS.items() if any(n in event.key for n in names))
            seconds[kind] += event.self_cpu_time_total / 1e6
    print("\n| operators of one step | seconds |\n|---|---|")
    for kind in OPERATORS:
        print(f"| {kind} | {seconds[kind]:.3f} |")


if __name__ == "__main__":
    main()
