"""The plan of a job: every kind of rank measured without numbers, and what follows from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from plugin.config import JobConfig
from plugin.config.device_defaults import Capabilities, on_device
from plugin.errors import ConfigError
from plugin.plan.full_microbatches import full_microbatch, full_share
from plugin.plan.gpus import Gpu
from plugin.plan.planned_rank import Collectives, MeasuredRank, World, built_rank
from plugin.plan.sample_lengths import SampleLengths
from plugin.plan.weight_coverage import Claims
from plugin.ragged import Ragged

#: What the driver, the CUDA context and NCCL take of a GPU: assumed, because `meta` cannot know.
RESERVED_BYTES = 2 << 30
#: In-flight microbatches that are run; the memory of more is a straight line through the last two.
_MOST_RUN = 3


@dataclass(frozen=True)
class Models:
    """Hugging Face configs of a job; reference and teacher where the loss needs them."""

    policy: Any
    copies: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankKind:
    """Ranks that hold and do the same, by one of them.

    bytes: parameters, gradients, main_parameters, optimizer, activations, logits, other (reference
        and teacher, and what is reserved for driver and NCCL)
    flops: of one step; layers: numbers of its first and last layer, from 1
    extrapolated: whether more microbatches are in flight than were run
    """

    kind: str
    count: int
    example_rank: int
    parameters: int
    bytes: dict[str, int]
    collectives: Collectives
    flops: float
    layers: tuple[int, int]
    extrapolated: bool

    @property
    def peak_bytes(self) -> int:
        return sum(self.bytes.values())


@dataclass(frozen=True)
class Batching:
    """How one optimizer step is cut: for each data parallel rank, and as a whole.

    microbatches: per rank; tokens: per data parallel rank, [dp]
    balance: tokens' work of the busiest rank over the mean
    """

    microbatches: int
    padding_share: float
    oversize: int
    samples: int
    tokens: list[int]
    balance: float
    largest: list[int]
    attention_share: float


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
    def fullest(self) -> RankKind:
        return max(self.kinds, key=lambda kind: kind.peak_bytes)


def decided(config: JobConfig, gpu: Gpu | None) -> JobConfig:
    """The configuration with what unset flags mean on the planned device.

    Transformer Engine's layers cannot be built here: the local ones are, in bfloat16 where it
    computes in float8, and with its kernels' memory.
    """
    found = Capabilities(cuda=gpu is not None, transformer_engine=gpu is not None)
    return on_device(config, found).unchecked_copy(transformer_impl="local", fp8=None)


def plan_job(
    config: JobConfig,
    models: Models,
    lengths: SampleLengths,
    gpu: Gpu | None,
    *,
    ranks: Sequence[int] | None = None,
    begin: Callable[[str], None] = lambda _: None,
) -> JobPlan:
    """Build and step one rank of every kind.

    ranks: these instead of one per kind; begin: told what is planned next
    """
    from plugin.megatron_backend.model.layout_rules import check_model
    from plugin.megatron_backend.model.weight_sources import whole_parameters

    config = decided(config, gpu)
    check_model(models.policy, config)
    batching = plan_batching(config, models.policy, lengths)
    world = World.of(config, config.world_size)
    stages = config.pipeline_model_parallel_size
    per_stage = world.size // stages
    examples = list(ranks) if ranks else [stage * per_stage for stage in range(stages)]
    for rank in examples:
        if not 0 <= rank < world.size:
            raise ConfigError(f"--ranks names {rank}, the job has ranks 0 to {world.size - 1}")
    kinds, claims, object_bytes = [], Claims(), 0
    batch_bytes = total = 0
    # The last stage first: the others hear its metrics.
    for rank in sorted(examples, reverse=True):
        stage = rank // per_stage
        begin(f"rank {rank} (stage {stage + 1} of {stages})")
        with built_rank(
            rank, world, config, models.policy, _layout(config, gpu), on_gpu=gpu is not None
        ) as planned:
            planned.traffic.object_bytes = object_bytes
            run = _Stage(planned, config, models, lengths, batching)
            measured, extrapolated = run.measure(stages - stage)
            heard = measured.collectives.get(("PIPELINE_MODEL_PARALLEL_GROUP", "broadcast"))
            if stage == stages - 1 and heard:
                object_bytes = heard[1] - 8
            trainer = planned.trainer
            claims.add(trainer.chunks, trainer.groups)
            total += whole_parameters(trainer.chunks, trainer.groups)
            batch_bytes = max(batch_bytes, run.batch_bytes)
            kinds.append(_kind(run, measured, stage, 1 if ranks else per_stage, extrapolated, gpu))
    return JobPlan(
        config,
        models.policy,
        world.size,
        total if not ranks else 0,
        kinds[::-1],
        batching,
        batch_bytes,
        gpu,
        claims,
        lengths,
    )


def plan_batching(config: JobConfig, hf_config: Any, lengths: SampleLengths) -> Batching:
    """Cut a step's samples as the driver would."""
    from plugin.batch_types import RolloutBatch
    from plugin.megatron_backend.step.batch_share import plan_batch
    from plugin.megatron_backend.step.microbatching import sample_cost

    cp, pp = config.context_parallel_size, config.pipeline_model_parallel_size
    dp = config.world_size // (config.tensor_model_parallel_size * pp * cp)
    batch = RolloutBatch({"total_lengths": lengths.totals, "response_lengths": lengths.responses})
    plan = plan_batch(
        batch,
        config,
        dp_size=dp,
        cp_size=cp,
        round_size=pp if config.virtual_pipeline_model_parallel_size else 1,
        hidden_size=hf_config.hidden_size,
        longest=hf_config.max_position_embeddings,
    )
    totals = lengths.totals
    samples = [[i for cell in rank for i in cell] for rank in plan.ranks]
    work = [sum(sample_cost(int(totals[i]), hf_config.hidden_size) for i in s) for s in samples]
    largest = full_microbatch(config, lengths, hf_config.max_position_embeddings)
    return Batching(
        plan.num_microbatches,
        plan.padding_share(),
        len(plan.oversize),
        len(totals),
        [int(totals[s].sum()) for s in samples],
        max(work) / (sum(work) / len(work)),
        largest.tolist(),
        # causal attention within samples, of all pairs of a row
        float((largest.astype(float) ** 2).sum() / largest.sum() ** 2 / 2),
    )


@dataclass
class _Stage:
    """One rank at work on microbatches that are as full as they may be."""

    planned: Any
    config: JobConfig
    models: Models
    lengths: SampleLengths
    batching: Batching
    batch_bytes: int = 0

    def measure(self, in_flight: int) -> tuple[MeasuredRank, bool]:
        """A step as the real one: its memory with all that are in flight, its traffic with all."""
        wanted = min(self.batching.microbatches, in_flight)
        if self.config.virtual_pipeline_model_parallel_size:
            stages = self.config.pipeline_model_parallel_size
            return self._scaled(self._run(min(self.batching.microbatches, 2 * stages))), False
        run = min(wanted, _MOST_RUN)
        before = self._run(run - 1) if wanted > run else None
        last = self._run(run)
        result = self._scaled(last)
        if before is None:
            return result, False
        more = (last.activations - before.activations) * (wanted - run)
        return dataclasses.replace(result, activations=last.activations + more), True

    def _run(self, microbatches: int) -> MeasuredRank:
        self._microbatches = microbatches
        watch = self.config.detect_mismatch or self.config.dump_log_probs is not None
        return self.planned.measured(self._share, with_log_probs=watch)

    def _share(self, trainer: Any) -> Any:
        routed = trainer.routed_model
        share = full_share(
            self.config,
            self.models.policy,
            np.array(self.batching.largest),
            self.lengths.response_share,
            microbatches=self._microbatches,
            route_layers=None if routed is None else routed.route_layers,
        )
        size = sum(_nbytes(column) for column in share.batch.columns.values())
        tokens = int(share.batch.columns["total_lengths"].sum())
        self.batch_bytes = round(size / tokens * max(self.batching.tokens))
        return share

    def _scaled(self, measured: MeasuredRank) -> MeasuredRank:
        """What repeats with every microbatch, as often as the job has microbatches."""
        times = self.batching.microbatches / self._microbatches
        scaled = {}
        for key, (count, size) in measured.collectives.items():
            repeated = measured.per_microbatch.get(key, (0, 0))
            scaled[key] = (
                round(count + repeated[0] * (times - 1)),
                round(size + repeated[1] * (times - 1)),
            )
        return dataclasses.replace(
            measured,
            collectives=scaled,
            flops=round(measured.flops * times),
            attention_flops=round(measured.attention_flops * times * self.batching.attention_share),
        )


def _kind(
    run: _Stage,
    measured: MeasuredRank,
    stage: int,
    count: int,
    extrapolated: bool,
    gpu: Gpu | None,
) -> RankKind:
    trainer = run.planned.trainer
    numbers = [
        layer.layer_number for chunk in trainer.chunks for layer in chunk.module.decoder.layers
    ]
    # Reference and teacher wait in host memory where they are offloaded.
    on_device = {} if run.config.reference_offload else run.models.copies
    copies = sum(run.planned.copy_bytes(run.config, other) for other in on_device.values())
    if run.config.trains_critic:
        copies += sum(measured.resident.values())  # a model of the policy's size, trained like it
    stages = run.config.pipeline_model_parallel_size
    parts = ["embedding"] if stage == 0 else []
    first, last = (min(numbers), max(numbers)) if numbers else (0, 0)
    parts.append(f"layers {first}-{last}")
    parts += ["loss"] if stage == stages - 1 else []
    return RankKind(
        f"stage {stage}: {', '.join(parts)}",
        count,
        measured.rank,
        measured.parameters,
        {
            **measured.resident,
            "activations": measured.activations,
            "logits": measured.logits,
            "other": copies + (RESERVED_BYTES if gpu is not None else 0),
        },
        measured.collectives,
        float(measured.flops + measured.attention_flops),
        (first, last),
        extrapolated,
    )


def _layout(config: JobConfig, gpu: Gpu | None) -> str:
    packs = (
        gpu is not None
        or config.max_tokens_per_gpu is not None
        or config.context_parallel_size > 1
        or config.virtual_pipeline_model_parallel_size is not None
    )
    return "packed" if packs else "padded"


def _nbytes(column: Any) -> int:
    values = column.values if isinstance(column, Ragged) else column
    return int(values.numel() * values.element_size())
