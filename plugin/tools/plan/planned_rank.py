"""One rank of a job, built and stepped without numbers: what it holds, and what it sends."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from plugin.config import TrainerConfig
from plugin.tools.plan.counted_group import Traffic, fake_world
from plugin.tools.plan.resident import count_parameters, resident_bytes
from plugin.tools.plan.shape_mode import LiveMemory, ShapesOnly
from plugin.tools.plan.stand_ins import numbers_left_out, use_gpu_kernels

Collectives = dict[tuple[str, str], tuple[int, int]]
"""(group, operation) -> how often, and the bytes that a rank puts in."""


@dataclass(frozen=True)
class MeasuredRank:
    """What one rank is made of and does in a step.

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


@dataclass(frozen=True)
class World:
    """The ranks of a job; sizes: Megatron's names of parallel sizes."""

    size: int
    sizes: dict[str, Any]

    @classmethod
    def of(cls, config: TrainerConfig, size: int) -> World:
        names = (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
            *("virtual_pipeline_model_parallel_size", "context_parallel_size"),
            *("expert_model_parallel_size", "expert_tensor_parallel_size"),
        )
        return cls(size, {name: getattr(config, name) for name in names})


@contextmanager
def built_rank(
    rank: int,
    world: World,
    config: TrainerConfig,
    hf_config: Any,
    layout: Any,
    *,
    on_gpu: bool,
    trainable: bool = True,
) -> Iterator[RankWithoutNumbers]:
    """The trainer of one rank within the body, on `meta`."""
    from plugin.megatron_backend import cpu_runtime
    from plugin.megatron_backend.trainer import MegatronTrainer

    traffic, memory = Traffic(), LiveMemory()
    with (
        cpu_runtime.without_data(),
        fake_world(rank, world.size, world.sizes, traffic) as groups,
        numbers_left_out(traffic, memory),
        ShapesOnly(memory) as mode,
    ):
        with mode.parameters_without_data(), memory.labelled("resident"):
            trainer = MegatronTrainer(config, hf_config, groups, layout=layout, trainable=trainable)
        trainer.device = torch.device("cpu")
        if on_gpu:
            use_gpu_kernels(trainer.chunks)
        yield RankWithoutNumbers(trainer, traffic, memory, mode)
        del trainer
    gc.collect()


@dataclass
class RankWithoutNumbers:
    """A trainer on `meta`, what it sent and what lived."""

    trainer: Any
    traffic: Traffic
    memory: LiveMemory
    mode: ShapesOnly

    def copy_bytes(self, config: TrainerConfig, hf_config: Any) -> int:
        """Parameters of a model that is only asked for log-probs, such as the reference."""
        from plugin.megatron_backend.model.builder import build_model

        with self.mode.parameters_without_data(), self.memory.labelled("resident"):
            chunks = build_model(hf_config, config, self.trainer.groups)
        return resident_bytes(chunks, None)["parameters"]

    def checkpoint_shapes(self) -> Mapping[str, Tensor]:
        """The tensors of the model's checkpoint, as transformers builds them."""
        from plugin.megatron_backend.hf_weights.sources import checkpoint_tensors

        with self.mode.parameters_without_data():
            return checkpoint_tensors(self.trainer.hf_config)

    def measured(self, share_of: Callable[[Any], Any], *, with_log_probs: bool) -> MeasuredRank:
        """Run one training step on what `share_of` gives of the trainer."""
        trainer, memory = self.trainer, self.memory
        share = share_of(trainer)
        self._expect_messages(share)
        if trainer.config.use_routing_replay:
            trainer.compute_log_probs(share)  # whose routes the step repeats
        config = trainer.hf_config
        memory.logits_width = -(-config.vocab_size // trainer.groups.tp_size)
        self.traffic.restart()
        self.mode.matmul_flops = self.mode.attention_flops = 0
        memory.restart()
        step, peaks = trainer.optimizer.step, []

        def optimize() -> Any:
            peaks.append(memory.restart())
            with memory.labelled("resident"):
                return step()

        trainer.optimizer.step = optimize
        with memory.labelled("activations"), self._schedule_marked():
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
            collectives=_as_tuples(self.traffic.counts),
            per_microbatch=_as_tuples(self.traffic.per_microbatch),
        )

    def asked_bytes(self, share_of: Callable[[Any], Any]) -> int:
        """Activations and logits at the peak of a pass that computes log-probs alone."""
        share = share_of(self.trainer)
        self._expect_messages(share)
        self.traffic.restart()
        self.memory.restart()
        with self.memory.labelled("activations"):
            self.trainer.compute_log_probs(share)
        peak = self.memory.restart()
        return peak.get("activations", 0) + peak.get("logits", 0)

    @contextmanager
    def _schedule_marked(self) -> Iterator[None]:
        """In the body, the traffic knows what is part of a schedule and what ends a step."""
        from plugin.megatron_backend import trainer as module

        schedule, traffic = module.run_schedule, self.traffic
        config = self.trainer.chunks[0].config
        finish = config.finalize_model_grads_func

        def run(*args: Any, **kwargs: Any) -> Any:
            traffic.in_schedule = True
            result = schedule(*args, **kwargs)
            traffic.in_schedule = False
            return result

        def finish_outside(*args: Any, **kwargs: Any) -> Any:
            traffic.in_schedule = False
            return finish(*args, **kwargs)

        with patch.object(module, "run_schedule", run):
            config.finalize_model_grads_func = finish_outside
            yield
            config.finalize_model_grads_func = finish

    def _expect_messages(self, share: Any) -> None:
        """Stages announce the shape of each message; they all have the same microbatches."""
        trainer = self.trainer
        groups = trainer.groups
        if groups.pp_size == 1 or groups.vpp_size:
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
        self.traffic.expected_shape = lambda number, _: shapes[number]


def _as_tuples(counts: dict[tuple[str, str], list[int]]) -> Collectives:
    return {key: (number, size) for key, (number, size) in counts.items()}
