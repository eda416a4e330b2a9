"""One rank of a job, built and stepped on `meta`: what it holds, and what it sends."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from plugin.config import JobConfig, TrainerConfig
from plugin.ragged import Integers, Ragged
from plugin.tools.plan.fake_world import Traffic, fake_world
from plugin.tools.plan.meta_kernels import use_gpu_kernels, use_meta_kernels
from plugin.tools.plan.meta_mode import LiveMemory, MetaMode
from plugin.tools.plan.workload import Batching, SampleLengths, full_share

Collectives = dict[tuple[str, str], tuple[int, int]]
"""(group, operation) -> count, and a rank's input bytes."""


@dataclass(frozen=True)
class MeasuredRank:
    """What one rank holds, sends and computes in a step.

    resident: bytes between steps; activations, logits: bytes at the peak of forward and backward
    collectives: of the step; per_microbatch: those of them that repeat with every microbatch
    flops: of matrix products; attention_flops: over all pairs of tokens of a row
    """

    rank: int
    parameters: int
    resident: dict[str, int]
    activations: int = 0
    logits: int = 0
    flops: int = 0
    attention_flops: int = 0
    collectives: Collectives = field(default_factory=dict)
    per_microbatch: Collectives = field(default_factory=dict)


def parallel_sizes(config: TrainerConfig) -> dict[str, Any]:
    """The parallel sizes by Megatron's names, as `initialize_model_parallel` takes them."""
    names = (
        *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
        *("virtual_pipeline_model_parallel_size", "context_parallel_size"),
        *("expert_model_parallel_size", "expert_tensor_parallel_size"),
    )
    return {name: getattr(config, name) for name in names}


@contextmanager
def built_rank(
    rank: int,
    world_size: int,
    config: TrainerConfig,
    hf_config: Any,
    layout: Any,
    *,
    on_gpu: bool,
) -> Iterator[MetaRank]:
    """Build the trainer of one rank on `meta`, for the body."""
    from plugin.megatron_backend import cpu_runtime
    from plugin.megatron_backend.trainer import MegatronTrainer

    traffic, memory = Traffic(), LiveMemory()
    with (
        cpu_runtime.meta_mode(),
        fake_world(rank, world_size, parallel_sizes(config), traffic) as groups,
        MetaMode(memory) as mode,
    ):
        with mode.meta_parameters(), memory.labelled("resident"):
            trainer = MegatronTrainer(
                config,
                hf_config,
                groups,
                layout=layout,
                pipeline=_counted_pipeline(groups, traffic),
                device=torch.device("cpu"),
            )
        assert trainer.optimizer is not None
        use_meta_kernels(trainer.chunks, trainer.optimizer.optimizer)
        if on_gpu:
            use_gpu_kernels(trainer.chunks)
        yield MetaRank(trainer, traffic, memory, mode)
        del trainer
    gc.collect()


def _counted_pipeline(groups: Any, traffic: Traffic) -> Any:
    """The trainer's pipeline, which tells `traffic` when a schedule begins and ends."""
    from plugin.megatron_backend.step.schedule import Pipeline

    class CountedPipeline(Pipeline):
        def run(
            self, forward_step: Any, chunks: Any, microbatches: Any, *, forward_only: bool = False
        ) -> list[Any]:
            config = chunks[0].config
            finish = config.finalize_model_grads_func

            def finish_outside(*args: Any, **kwargs: Any) -> Any:
                traffic.in_schedule = False
                return finish(*args, **kwargs)

            config.finalize_model_grads_func = finish_outside
            traffic.in_schedule = True
            try:
                return super().run(forward_step, chunks, microbatches, forward_only=forward_only)
            finally:
                traffic.in_schedule = False
                config.finalize_model_grads_func = finish

        def from_last_stage(self, value: Any) -> Any:
            if self.groups.is_last_stage:
                return super().from_last_stage(value)
            # The other stages receive its size, then the pickled object.
            source = dist.get_global_rank(groups.pp_group, groups.pp_size - 1)
            for size in (8, traffic.object_bytes):
                message = torch.zeros(size, dtype=torch.uint8)
                dist.broadcast(message, src=source, group=groups.pp_group)
            return {}

    return CountedPipeline(groups)


@dataclass
class MetaRank:
    """A trainer on `meta`, its traffic and its live memory."""

    trainer: Any
    traffic: Traffic
    memory: LiveMemory
    mode: MetaMode

    def copy_bytes(self, config: TrainerConfig, hf_config: Any) -> int:
        """Bytes of a model that only computes log-probs, such as the reference."""
        from plugin.megatron_backend.model.builder import build_model

        with self.mode.meta_parameters(), self.memory.labelled("resident"):
            chunks = build_model(hf_config, config, self.trainer.groups)
        return resident_bytes(chunks, None)["parameters"]

    def measured(self, share_of: Callable[[Any], Any], *, with_log_probs: bool) -> MeasuredRank:
        """Run one training step on the share that `share_of` makes for the trainer."""
        trainer, memory = self.trainer, self.memory
        share = share_of(trainer)
        self._expect_messages(share)
        if trainer.config.use_routing_replay:
            trainer.compute_log_probs(share)  # whose routes the step repeats
        config = trainer.hf_config
        memory.logits_width = -(-config.vocab_size // trainer.groups.tp_size)
        self.traffic.reset()
        self.mode.matmul_flops = self.mode.attention_flops = 0
        memory.reset()
        step, peaks = trainer.optimizer.step, []

        def optimize() -> Any:
            peaks.append(memory.reset())
            with memory.labelled("resident"):
                return step()

        trainer.optimizer.step = optimize
        with memory.labelled("activations"):
            trainer.train_step(share, with_log_probs=with_log_probs)
        trainer.optimizer.step = step
        peak = peaks[0]
        return MeasuredRank(
            trainer.groups.rank,
            count_parameters(trainer.chunks),
            resident_bytes(trainer.chunks, trainer.optimizer.optimizer),
            activations=peak.get("activations", 0),
            logits=peak.get("logits", 0),
            flops=self.mode.matmul_flops,
            attention_flops=self.mode.attention_flops,
            collectives={key: (n, size) for key, (n, size) in self.traffic.counts.items()},
            per_microbatch={
                key: (n, size) for key, (n, size) in self.traffic.per_microbatch.items()
            },
        )

    def log_prob_bytes(self, share_of: Callable[[Any], Any]) -> int:
        """Activations and logits at the peak of a pass that computes log-probs alone."""
        share = share_of(self.trainer)
        self._expect_messages(share)
        self.traffic.reset()
        self.memory.reset()
        with self.memory.labelled("activations"):
            self.trainer.compute_log_probs(share)
        peak = self.memory.reset()
        return peak.get("activations", 0) + peak.get("logits", 0)

    def _expect_messages(self, share: Any) -> None:
        """Stages announce the shape of each message; they all have the same microbatches."""
        trainer = self.trainer
        groups = trainer.groups
        if groups.pp_size == 1 or groups.vpp_size or not trainer.config.variable_seq_lengths:
            return
        split = groups.tp_size if trainer.config.sequence_parallel else 1
        shapes = [
            (
                m.inputs.tokens.shape[1] // split,
                m.inputs.tokens.shape[0],
                trainer.hf_config.hidden_size,
            )
            for m in trainer._laid_out(share.microbatches())
        ]
        self.traffic.expected_shapes = shapes


def resident_bytes(chunks: Sequence[Any], optimizer: Any | None) -> dict[str, int]:
    """Bytes of parameters, gradients, main parameters and optimizer state of a trainer.

    Parameters and gradients count with the padding of the buffers that they lie in.

    chunks: in DDP where they are trained; optimizer: Megatron's, None of a model that is not
    """
    seen: set[int] = set()
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    buffers = []
    if optimizer is not None:
        buffers = [b for c in chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
    main, state = _optimizer_tensors(optimizer)
    return {
        "parameters": _new_bytes(parameters, seen),
        "gradients": _new_bytes([buffer.grad_data for buffer in buffers], seen),
        "main_parameters": _new_bytes(main, seen),
        "optimizer": _new_bytes(state, seen),
    }


def count_parameters(chunks: Sequence[Any]) -> int:
    """Number of parameters in the chunks, without padding of buffers."""
    return sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())


def _optimizer_tensors(optimizer: Any | None) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that the optimizer updates, and its state."""
    if optimizer is None:
        return [], []
    main, state = [], []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        if inner is None:
            continue  # a rank whose shard of the buffers is padding alone
        on_host = getattr(inner, "gpu_params_map_cpu_copy", {})
        main += [p for group in inner.param_groups for p in group["params"]]
        held = (entry for p, entry in inner.state.items() if p not in on_host)
        state += [t for entry in held for t in entry.values()]
    # Adam's step counters have no dimension; they lie in host memory.
    return main, [t for t in state if isinstance(t, Tensor) and t.dim()]


def shard_sizes(chunks: Sequence[Any], *, experts: bool) -> Integers:
    """[ranks] size of the optimizer shard of every rank of a data parallel group.

    The distributed optimizer cuts each bucket into equal shards. Padding at a bucket's end and
    between parameters is in the gradient buffer of every rank and in the optimizer state of none,
    so ranks of one stage may hold different amounts.

    experts: of the experts' parameters, which have their own data parallel group
    """
    buffers = [b for c in chunks for b in (c.expert_parallel_buffers if experts else c.buffers)]
    total = np.zeros(1, np.int64)
    for buffer in buffers:
        ranges = np.array([place[:2] for place in buffer.param_index_map.values()]).T
        ranks = np.arange(buffer.data_parallel_group.size())[:, None]
        for bucket in buffer.buckets:
            size = bucket.grad_data.numel() // len(ranks)
            first = bucket.offset + ranks * size
            held = np.minimum(ranges[1], first + size) - np.maximum(ranges[0], first)
            total = total + held.clip(min=0).sum(axis=1)
    return total


def _new_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total


@dataclass
class StageRun:
    """Runs steps of one rank and scales them to the job's number of microbatches.

    quick: run as few microbatches as a line takes, and none of padding
    batch_bytes: what the driver sends this rank for a step; known after the first step
    """

    planned: MetaRank
    config: JobConfig
    model: Any
    lengths: SampleLengths
    batching: Batching
    quick: bool = False
    batch_bytes: int = 0

    def measure(self, in_flight: int) -> tuple[MeasuredRank, bool]:
        """The measured step, scaled to the job, and whether its activations are extrapolated.

        Its memory is with all microbatches that are in flight, its traffic with all of the busiest
        data parallel rank. Where other ranks have padding microbatches, a step with one runs too.
        """
        microbatches = self.batching.microbatches
        wanted = min(microbatches, in_flight)
        interleaved = self.config.virtual_pipeline_model_parallel_size is not None
        if interleaved:
            run = min(microbatches, 2 * self.config.pipeline_model_parallel_size)
            before = None
        else:
            # The memory of more in flight is a straight line through the last two.
            run = min(wanted, 2 if self.quick else 3)
            before = self._run(run - 1) if wanted > run else None
        last = self._run(run)
        activations = last.activations
        if before is not None:
            activations += (last.activations - before.activations) * (wanted - run)
        if self.batching.padding and not self.quick:
            # The interleaved schedule wants whole rounds, so there it replaces a full one.
            padded = self._run(run if interleaved else min(microbatches, run + 1), padding=1)
            activations = max(activations, padded.activations)
        result = self._scaled(last, microbatches / run)
        return dataclasses.replace(result, activations=activations), before is not None

    def beyond_step(self, weights: int, step: MeasuredRank) -> int:
        """Bytes that a rank needs beyond the step's peak while it asks a model for log-probs.

        weights: of that model, which are there for the pass only
        """
        interleaved = self.config.virtual_pipeline_model_parallel_size is not None
        most = self.config.pipeline_model_parallel_size if interleaved else 2
        count = min(self.batching.microbatches, most)
        needed = self.planned.log_prob_bytes(lambda trainer: self._share(trainer, count, 0))
        return max(0, weights + needed - step.activations - step.logits)

    def _run(self, microbatches: int, padding: int = 0) -> MeasuredRank:
        watch = self.config.detect_mismatch or self.config.dump_log_probs is not None
        return self.planned.measured(
            lambda trainer: self._share(trainer, microbatches, padding), with_log_probs=watch
        )

    def _share(self, trainer: Any, microbatches: int, padding: int) -> Any:
        routed = trainer.routed_model
        share = full_share(
            self.config,
            self.model,
            np.array(self.batching.largest),
            self.lengths.response_share,
            microbatches=microbatches,
            padding=padding,
            route_layers=None if routed is None else routed.route_layers,
        )
        tokens = int(share.batch.columns["total_lengths"].sum())
        if tokens and not padding:
            columns = share.batch.columns.values()
            values = [c.values if isinstance(c, Ragged) else c for c in columns]
            size = sum(v.numel() * v.element_size() for v in values)
            self.batch_bytes = round(size / tokens * max(self.batching.tokens))
        return share

    def _scaled(self, measured: MeasuredRank, times: float) -> MeasuredRank:
        """Multiply what repeats with every microbatch by `times`."""
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
