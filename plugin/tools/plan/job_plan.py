"""The plan of a job: each kind of rank measured on `meta`; flags that help if it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from plugin.config import JobConfig
from plugin.config.device_defaults import Capabilities, on_device
from plugin.errors import ConfigError, MegatronTisError
from plugin.tools.plan.checkpoint_coverage import Claims
from plugin.tools.plan.estimates import Gpu
from plugin.tools.plan.layouts import command_line
from plugin.tools.plan.planned_rank import (
    Collectives,
    MeasuredRank,
    StageRun,
    built_rank,
    shard_sizes,
)
from plugin.tools.plan.workload import (
    Batching,
    SampleLengths,
    plan_batching,
    whole_counts,
    with_token_budget,
)

#: Memory of the driver, the CUDA context and NCCL on a GPU: assumed, `meta` cannot know it.
RESERVED_BYTES = 2 << 30


@dataclass(frozen=True)
class Models:
    """Hugging Face configs of a job; reference and teacher where the loss needs them."""

    policy: Any
    copies: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankKind:
    """Ranks that hold and do the same, described by one of them.

    stage: of the pipeline, from 0
    bytes: parameters, gradients, main_parameters, optimizer, activations, logits, other (reference
        and teacher, and what is reserved for driver and NCCL)
    flops: of one step
    extrapolated: whether more microbatches are in flight than were run
    trained: number of parameters with gradients
    host_bytes: of the weights of earlier versions that are kept in host memory
    """

    kind: str
    stage: int
    count: int
    example_rank: int
    parameters: int
    bytes: dict[str, int]
    collectives: Collectives
    flops: float
    extrapolated: bool
    trained: int = 0
    host_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return sum(self.bytes.values())


@dataclass(frozen=True)
class JobPlan:
    """What a job needs; `report` turns it into text, JSON and a page."""

    config: JobConfig
    model: Any
    world_size: int
    total_parameters: int
    kinds: list[RankKind]
    batching: Batching
    batch_bytes: int
    gpu: Gpu | None
    claims: Claims
    lengths: SampleLengths

    @property
    def fits(self) -> bool | None:
        """Whether every kind of rank fits; None without a GPU to compare with."""
        if self.gpu is None:
            return None
        return all(kind.peak_bytes <= self.gpu.memory for kind in self.kinds)

    @property
    def stages(self) -> list[RankKind]:
        """One kind of every planned stage; the others differ in their optimizer shard only."""
        return list({kind.stage: kind for kind in reversed(self.kinds)}.values())[::-1]

    @property
    def fullest(self) -> RankKind:
        return max(self.kinds, key=lambda kind: kind.peak_bytes)


def resolved(config: JobConfig, gpu: Gpu | None) -> JobConfig:
    """The configuration with unset flags resolved for the planned device.

    Transformer Engine's layers cannot be built here. The local ones stand in, in bfloat16 where it
    computes in float8, and with its kernels' memory. Its Adam is planned as a plain one, DeepEP as
    a plain all-to-all.
    """
    found = Capabilities(cuda=gpu is not None, transformer_engine=gpu is not None)
    decided = on_device(config, found)
    flex = decided.moe_token_dispatcher_type == "flex"
    recomputed = [name for name in decided.recomputed_modules or () if name != "moe_act"]
    return decided.unchecked_copy(
        transformer_impl="local",
        fp8=None,
        gradient_accumulation_fusion=False,
        use_precision_aware_optimizer=False,
        moe_token_dispatcher_type="alltoall" if flex else decided.moe_token_dispatcher_type,
        recompute_modules=",".join(recomputed) or None,
    )


def build_error(error: Exception) -> str:
    """One line about a rank that Megatron-Core or torch cannot build or run."""
    lines = str(error).strip().splitlines() or ["no message"]
    return f"does not build: {type(error).__name__}: {lines[0]}"


def plan_job(
    config: JobConfig,
    models: Models,
    lengths: SampleLengths,
    gpu: Gpu | None,
    *,
    ranks: Sequence[int] | None = None,
    quick: bool = False,
    begin: Callable[[str], None] = lambda _: None,
) -> JobPlan:
    """Build and step one rank of every kind.

    ranks: these instead of one per kind; quick: run fewer microbatches, extrapolate more
    begin: called with what is planned next
    """
    from plugin.megatron_backend.hf_weights.loading import whole_parameters
    from plugin.megatron_backend.model.layout_rules import check_model
    from plugin.megatron_backend.step.sequence_packing import sequence_layout

    if config.max_tokens_per_gpu == "auto":
        config = with_token_budget(config, models.policy, whole_counts(models.policy), gpu)
    config = resolved(config, gpu)
    check_model(models.policy, config)
    layout = sequence_layout(config, transformer_engine=gpu is not None)
    batching = plan_batching(config, models.policy, lengths)
    world_size, stages = config.world_size, config.pipeline_model_parallel_size
    per_stage = world_size // stages
    # Of a context parallel group the first rank has the prompts, the last only responses to score.
    place = config.tensor_model_parallel_size * (config.context_parallel_size - 1)
    examples = list(ranks or range(place, world_size, per_stage))
    for rank in examples:
        if not 0 <= rank < world_size:
            raise ConfigError(f"--ranks names {rank}, the job has ranks 0 to {world_size - 1}")
    kinds: list[RankKind] = []
    claims, object_bytes = Claims(), 0
    batch_bytes = total = 0
    # The last stage first: the others receive its metrics.
    for rank in sorted(examples, reverse=True):
        stage = rank // per_stage
        begin(f"rank {rank} (stage {stage + 1} of {stages})")
        with built_rank(
            rank, world_size, config, models.policy, layout, on_gpu=gpu is not None
        ) as planned:
            planned.traffic.object_bytes = object_bytes
            run = StageRun(planned, config, models.policy, lengths, batching, quick)
            measured, extrapolated = run.measure(stages - stage)
            received = measured.collectives.get(("PIPELINE_MODEL_PARALLEL_GROUP", "broadcast"))
            if stage == stages - 1 and received:
                object_bytes = received[1] - 8
            trainer = planned.trainer
            claims.add(trainer.chunks, trainer.groups)
            total += whole_parameters(trainer.chunks, trainer.groups)
            batch_bytes = max(batch_bytes, run.batch_bytes)
            kind = _kind(run, models, measured, stage, extrapolated, gpu)
            kinds = ([kind] if ranks else _kinds_of_stage(kind, planned, config)) + kinds
    return JobPlan(
        config,
        models.policy,
        world_size,
        total if not ranks else 0,
        kinds,
        batching,
        batch_bytes,
        gpu,
        claims,
        lengths,
    )


def _kind(
    run: StageRun,
    models: Models,
    measured: MeasuredRank,
    stage: int,
    extrapolated: bool,
    gpu: Gpu | None,
) -> RankKind:
    trainer = run.planned.trainer
    numbers = [
        layer.layer_number for chunk in trainer.chunks for layer in chunk.module.decoder.layers
    ]
    parameters = [p for chunk in trainer.chunks for p in chunk.parameters()]
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    a_version = sum(p.nbytes for p in parameters if p.requires_grad)
    sizes = [run.planned.copy_bytes(run.config, other) for other in models.copies.values()]
    other = sum(sizes)
    if sizes and run.config.reference_offload:
        # One at a time is on the device, and only while it scores, before the step.
        other = run.beyond_step(max(sizes), measured)
    if run.config.trains_critic:
        # A fully trained model of the policy's size.
        resident = measured.resident
        state = sum(resident.values()) - resident["parameters"]
        other += resident["parameters"] + state * measured.parameters // max(1, trained)
    stages = run.config.pipeline_model_parallel_size
    parts = ["embedding"] if stage == 0 else []
    first, last = (min(numbers), max(numbers)) if numbers else (0, 0)
    parts.append(f"layers {first}-{last}")
    parts += ["loss"] if stage == stages - 1 else []
    return RankKind(
        f"stage {stage}: {', '.join(parts)}",
        stage,
        1,
        measured.rank,
        measured.parameters,
        {
            **measured.resident,
            "activations": measured.activations,
            "logits": measured.logits,
            "other": other + (RESERVED_BYTES if gpu is not None else 0),
        },
        measured.collectives,
        float(measured.flops + measured.attention_flops),
        extrapolated,
        trained,
        run.config.kept_weight_versions * a_version,
    )


def _kinds_of_stage(kind: RankKind, planned: Any, config: JobConfig) -> list[RankKind]:
    """All kinds of ranks in a stage, derived from one of them.

    Every layout that is accepted cuts heads, hidden sizes, experts and the padded vocabulary
    evenly; only the shards of a distributed optimizer can differ.
    """
    ranks = planned.trainer.groups.world_size // config.pipeline_model_parallel_size
    if not config.use_distributed_optimizer:
        return [replace(kind, count=ranks)]
    chunks, tensor = planned.trainer.chunks, config.tensor_model_parallel_size
    expert = config.expert_model_parallel_size * config.expert_tensor_parallel_size
    dense, experts = shard_sizes(chunks, experts=False), shard_sizes(chunks, experts=True)
    # Ranks are numbered tensor, context, data; of experts: tensor, expert, data.
    places = np.arange(ranks)
    held = dense[places // tensor % len(dense)] + experts[places // expert % len(experts)]
    first, place = kind.example_rank - kind.example_rank % ranks, kind.example_rank % ranks
    found = [replace(kind, count=int((held == held[place]).sum()))]
    for numbers in dict.fromkeys(held[held != held[place]].tolist()):
        same = np.flatnonzero(held == numbers)
        shard = {
            part: kind.bytes[part] * numbers // int(held[place])
            for part in ("main_parameters", "optimizer")
        }
        found.append(
            replace(
                kind,
                kind=f"{kind.kind}, optimizer shard of {numbers:,}",
                count=len(same),
                example_rank=first + int(same[0]),
                bytes=kind.bytes | shard,
            )
        )
    return found


@dataclass(frozen=True)
class Advice:
    """A change of flags and the peak of the fullest rank with it."""

    flags: str
    peak_bytes: int
    fits: bool


def best_flags(plan: JobPlan, models: Models, begin: Callable[[str], None]) -> list[Advice]:
    """The three changes that lower the fullest rank's peak most, lowest first."""
    found = []
    for changes in _candidates(plan.config):
        flags = command_line(changes)
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


def _candidates(config: JobConfig) -> list[dict[str, Any]]:
    """Changes of settings that may lower the peak."""
    found: list[dict[str, Any]] = []
    if not config.use_distributed_optimizer:
        found.append({"use_distributed_optimizer": True})
    if config.recompute_granularity != "full":
        recompute = {"recompute_method": "uniform", "recompute_num_layers": 1}
        found.append({"recompute_granularity": "full", **recompute})
    if config.train_dtype == "float32":
        found.append({"train_dtype": "bfloat16"})
    if isinstance(config.max_tokens_per_gpu, int):
        found.append({"max_tokens_per_gpu": config.max_tokens_per_gpu // 2})
    tensor = 2 * config.tensor_model_parallel_size
    found.append({"tensor_model_parallel_size": tensor, "sequence_parallel": True})
    for name in ("pipeline_model_parallel_size", "expert_model_parallel_size"):
        found.append({name: 2 * getattr(config, name)})
    return found
