"""Whole training steps of the real trainer: how long, and which share is loss and hook.

Loss and hook are everything between the logits and their gradient: log-probs and entropy, the policy loss, its
correction, regularizers, metrics, and the backward pass down to the logits. The LM head's products belong to the model.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.workers import run_in_ranks
from plugin.batch_types import RolloutBatch
from plugin.config import TrainerConfig

if TYPE_CHECKING:
    from plugin.megatron_backend.parallel_groups import ParallelGroups

HOOK = "plugin.ppo_utils.vanilla_tis_function"


class Model(NamedTuple):
    """A Qwen3 of this size; tied embeddings."""

    name: str
    hidden: int
    layers: int
    heads: int
    vocabulary: int = 151_936


TINY = Model("tiny", 32, 2, 4, 512)
SMALL = Model("4 layers, hidden 256", 256, 4, 4)
LARGEST = Model("28 layers, hidden 1024", 1024, 28, 16)


class Step(NamedTuple):
    """What is trained and how it is cut; `sizes` are Megatron's parallel sizes."""

    model: Model
    tokens: int
    microbatch: int
    ranks: int = 1
    sizes: tuple[tuple[str, int], ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()


def all_steps(quick: bool) -> list[Step]:
    """Microbatch sizes, then paths, then ranks, then the largest model."""
    small, tokens = (TINY, 128) if quick else (SMALL, 2048)
    cuts = [Step(small, tokens, tokens // part) for part in (16, 4, 1)]
    options: list[tuple[tuple[str, Any], ...]] = [
        (("fused_lm_head", "off"), ("separable_fast_path", "off")),
        (
            ("fused_lm_head", "off"),
            ("separable_fast_path", "off"),
            ("inplace_logits_grad", False),
        ),
        (("fused_lm_head", "on"), ("separable_fast_path", "off")),
    ]
    paths = [Step(small, tokens, tokens // 4, settings=settings) for settings in options]
    ranks = [
        Step(small, tokens, tokens // 4, 2),
        Step(small, tokens, tokens // 4, 2, (("tensor_model_parallel_size", 2),)),
        Step(small, tokens, tokens // 4, 2, (("pipeline_model_parallel_size", 2),)),
    ]
    large = [] if quick else [Step(LARGEST, 512, size) for size in (128, 512)]
    return [*cuts, *paths, *ranks, *large]


def batch_statistics_steps(quick: bool) -> list[Step]:
    """Corrections with thresholds over the whole batch, in one process and over two data-parallel ranks."""
    small, tokens = (TINY, 128) if quick else (SMALL, 2048)
    rules: list[tuple[tuple[str, Any], ...]] = [
        (("custom_tis_function_path", "plugin.ppo_utils.m2po_function"), ("m2po_threshold", 0.005)),
        (("custom_tis_function_path", "plugin.ppo_utils.ess_tis_function"),),
        (("tis_clip", "auto:ess=0.9"),),
    ]
    return [
        Step(small, tokens, tokens // 4, ranks, settings=settings)
        for ranks in (1, 2)
        for settings in rules
    ]


def measure_batch_statistics(quick: bool) -> list[dict[str, Any]]:
    """What looking at the whole batch before the training pass costs."""
    return measure_steps(quick, batch_statistics_steps(quick))


def measure_steps(quick: bool, chosen: list[Step] | None = None) -> list[dict[str, Any]]:
    """Every layout in processes of its own."""
    found = []
    layouts = itertools.groupby(
        chosen or all_steps(quick), lambda step: (step.model, step.ranks, step.sizes)
    )
    for (model, ranks, sizes), steps in layouts:
        print(f"  {model.name}, {ranks} ranks, {dict(sizes)}", file=sys.stderr, flush=True)
        found += run_in_ranks(
            _measure,
            (list(steps), 1 if model == LARGEST else 3),
            ranks=ranks,
            threads=2 if ranks == 1 else 1,
            seconds=1800,
            tensor_parallel=False,
        )
    return found


def _measure(_: dist.ProcessGroup | None, steps: list[Step], repeats: int) -> list[dict[str, Any]]:
    from megatron.core import parallel_state

    from plugin.megatron_backend import cpu_runtime
    from plugin.megatron_backend.parallel_groups import read_parallel_groups

    cpu_runtime.activate()
    parallel_state.initialize_model_parallel(**dict(steps[0].sizes))
    groups = read_parallel_groups()
    return [_measure_step(groups, step, repeats) for step in steps]


def _measure_step(groups: ParallelGroups, step: Step, repeats: int) -> dict[str, Any]:
    from plugin.megatron_backend.trainer import MegatronTrainer

    settings = {
        "use_tis": True,
        "custom_tis_function_path": HOOK,
        "max_tokens_per_gpu": step.microbatch,
        **dict(step.sizes),
        **dict(step.settings),
    }
    trainer = MegatronTrainer(TrainerConfig(**settings), _hf_config(step.model), groups)
    batch = _batch(step)
    trainer.train_step(batch)  # memory is touched, kernels are loaded
    best: dict[str, Any] = {"seconds": float("inf")}
    for _ in range(repeats):
        with _timers() as spent:
            start = time.perf_counter()
            result = trainer.train_step(batch)
            seconds = time.perf_counter() - start
        if seconds < best["seconds"]:
            best = {"seconds": seconds, "spent": dict(spent)}
    by_rank: list[Any] = [None] * step.ranks
    dist.all_gather_object(by_rank, best)
    # Under pipeline parallelism only the last stage has a loss: its share is the one that counts.
    largest = max(by_rank, key=lambda found: sum(found["spent"].values()))
    return {
        "step": step._asdict() | {"model": step.model._asdict()},
        "parameters": sum(p.numel() for chunk in trainer.chunks for p in chunk.parameters()),
        "microbatches": result.metrics["num_microbatches"],
        "detectors": min(_detector_seconds(batch) for _ in range(3)),
        **largest,
    }


def _detector_seconds(batch: RolloutBatch) -> float:
    """What the driver spends on looking for a mismatch in this step's log-probs."""
    from plugin.observe.detectors import MismatchDetectors

    detectors = MismatchDetectors()
    start = time.perf_counter()
    detectors.check(batch.columns, step=0, trainer_version=0)
    return time.perf_counter() - start


@contextmanager
def _timers() -> Iterator[dict[str, float]]:
    """Adds up the time inside the functions that make up loss and hook."""
    from plugin.logprobs import fused_lm_head, separable_lm_head
    from plugin.logprobs import vocab_parallel as vocab_parallel_logprobs
    from plugin.megatron_backend import trainer
    from plugin.megatron_backend.step import microbatch_loss

    spent: dict[str, float] = {}

    def timed(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - start

        return call

    places: list[tuple[str, Any, str]] = [
        ("log-probs", microbatch_loss, "response_log_probs"),
        ("log-probs and gradient", separable_lm_head, "_to_gradient"),
        ("whole batch", trainer, "add_batch_statistics"),
        ("loss, hook, metrics", microbatch_loss, "compute_loss"),
        ("loss, hook, metrics", microbatch_loss, "record_step"),
        ("gradient of the logits", vocab_parallel_logprobs._LogProbsAndEntropy, "backward"),
        ("gradient through the fused head", fused_lm_head._FusedLmHead, "backward"),
    ]
    with ExitStack() as stack:
        for name, owner, attribute in places:
            stack.enter_context(
                mock.patch.object(owner, attribute, timed(name, getattr(owner, attribute)))
            )
        yield spent


def _hf_config(model: Model) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=model.vocabulary,
        hidden_size=model.hidden,
        intermediate_size=3 * model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.heads // 2,
        head_dim=max(16, 2 * model.hidden // model.heads),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )


def _batch(step: Step) -> RolloutBatch:
    """Samples of an eighth of the smallest microbatch or more; three quarters of each are response."""
    generator = torch.Generator().manual_seed(0)
    total = min(64, step.microbatch)
    count, response = step.tokens // total, 3 * total // 4

    def near(offset: float) -> list[torch.Tensor]:
        return [offset + 0.1 * torch.randn(response, generator=generator) for _ in range(count)]

    start = -float(torch.tensor(step.model.vocabulary).log())
    return RolloutBatch(
        {
            "unconcat_tokens": [
                torch.randint(step.model.vocabulary, (total,), generator=generator)
                for _ in range(count)
            ],
            "total_lengths": [total] * count,
            "response_lengths": [response] * count,
            "loss_masks": [torch.ones(response, dtype=torch.int64) for _ in range(count)],
            "advantages": near(0.0),
            "rollout_log_probs": near(start),
            "log_probs": near(start),
        }
    )
