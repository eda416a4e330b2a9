"""What would help most where a job does not fit: tried, not guessed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from plugin.config import JobConfig
from plugin.errors import MegatronTisError
from plugin.tools.plan.job_plan import JobPlan, Models, plan_job


@dataclass(frozen=True)
class Advice:
    """A change of flags and the peak of the fullest rank with it."""

    flags: str
    peak_bytes: int
    fits: bool


def best_flags(plan: JobPlan, models: Models, begin: Callable[[str], None]) -> list[Advice]:
    """The three changes that lower the fullest rank's peak most, lowest first."""
    found = []
    for flags, changes in _candidates(plan.config):
        try:
            changed = replace(plan.config, **changes)
            begin(f"with {flags}")
            rank = plan.fullest.example_rank * changed.world_size // plan.world_size
            tried = plan_job(changed, models, plan.lengths, plan.gpu, ranks=[rank])
        except MegatronTisError:
            continue  # not a choice for this model
        peak = tried.fullest.peak_bytes
        if peak < plan.fullest.peak_bytes:
            found.append(Advice(flags, peak, bool(tried.fits)))
    return sorted(found, key=lambda advice: advice.peak_bytes)[:3]


def _candidates(config: JobConfig) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    if not config.use_distributed_optimizer:
        found.append(("--use-distributed-optimizer", {"use_distributed_optimizer": True}))
    if config.recompute_granularity != "full":
        found.append(
            (
                "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
                {
                    "recompute_granularity": "full",
                    "recompute_method": "uniform",
                    "recompute_num_layers": 1,
                },
            )
        )
    if config.train_dtype == "float32":
        found.append(("--train-dtype bfloat16", {"train_dtype": "bfloat16"}))
    if config.max_tokens_per_gpu is not None:
        half = config.max_tokens_per_gpu // 2
        found.append((f"--max-tokens-per-gpu {half}", {"max_tokens_per_gpu": half}))
    tensor = 2 * config.tensor_model_parallel_size
    found.append(
        (
            f"--tensor-model-parallel-size {tensor} --sequence-parallel",
            {"tensor_model_parallel_size": tensor, "sequence_parallel": True},
        )
    )
    for name in ("pipeline_model_parallel_size", "expert_model_parallel_size"):
        size = 2 * getattr(config, name)
        found.append((f"--{name.replace('_', '-')} {size}", {name: size}))
    return found
