"""Run stock Megatron schedules; step the optimizer if the gradient is sound."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.step.grad_scaler import SharedGradScaler
from plugin.megatron_backend.step.preparation import PreparedMicrobatch
from plugin.ragged import Integers


class Pipeline:
    """What the pipeline stages of a model do together.

    A collaborator of `RankModel`: a plan of a job passes one that counts messages.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        self.groups = groups

    def run(
        self,
        forward_step: Callable[..., Any],
        chunks: Sequence[Any],
        microbatches: Sequence[PreparedMicrobatch],
        *,
        forward_only: bool = False,
    ) -> list[Any]:
        """Run one pass of the schedule that fits the layout: none, 1F1B or interleaved.

        Returns what the loss closures reported, on the last stage, in schedule order.
        """
        groups = self.groups
        schedule = get_forward_backward_func(groups.pp_size, groups.vpp_size)
        iterators = [iter(microbatches) for _ in chunks]
        rows, row_length = microbatches[0].inputs.tokens.shape
        return schedule(
            forward_step_func=forward_step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=len(microbatches),
            # Stages exchange the real shapes (variable_seq_lengths); these two only have to be
            # plausible.
            seq_length=row_length * groups.cp_size,
            micro_batch_size=rows,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def from_last_stage(self, value: Any) -> Any:
        """Return the last stage's `value`, any object, on every stage."""
        if self.groups.pp_size == 1:
            return value
        boxed = [value]
        dist.broadcast_object_list(boxed, src=self._last_rank, group=self.groups.pp_group)
        return boxed[0]

    def tensor_from_last_stage(self, tensor: Tensor) -> Tensor:
        """Return the last stage's `tensor` on every stage; it has one shape on all of them."""
        if self.groups.pp_size > 1:
            dist.broadcast(tensor, src=self._last_rank, group=self.groups.pp_group)
        return tensor

    @property
    def _last_rank(self) -> int:
        return dist.get_global_rank(self.groups.pp_group, self.groups.pp_size - 1)


def connect(chunks: Sequence[Any], optimizer: MegatronOptimizer) -> None:
    """Tell the model's config how to scale losses and how to finish gradients."""
    for chunk in chunks:
        chunk.config.grad_scale_func = optimizer.scale_loss
        chunk.config.finalize_model_grads_func = finalize_model_grads


class GuardedOptimizer:
    """A Megatron optimizer that skips a step whose gradient norm is not finite or too large.

    `optimizer.step()` stays Megatron's own; only its last act, applying the clipped gradients, asks
    first. The norm is reduced over all ranks, so all of them decide alike. In float16 Megatron
    itself skips what overflows, before there is a norm; its parts share one scaler.
    """

    def __init__(self, optimizer: MegatronOptimizer, max_norm: float | None = None) -> None:
        self.optimizer = optimizer
        self.skipped_steps = 0
        self.scaler = SharedGradScaler.of(optimizer)
        #: The last step was skipped because of a loss scale that is still being lowered.
        self.overflowed = False
        self._max_norm = math.inf if max_norm is None else max_norm
        self._norm = 0.0
        self._measure, self._apply = optimizer.get_grad_norm, optimizer.step_with_ready_grads
        optimizer.get_grad_norm = self._measured
        optimizer.step_with_ready_grads = self._apply_if_sound

    @property
    def loss_scale(self) -> float:
        """What the schedule multiplies losses by; reading it waits for the device in float16."""
        return 1.0 if self.scaler is None else float(self.scaler.scale)

    def step(self) -> tuple[bool, float]:
        """(whether the weights were updated, gradient norm before clipping, without loss scale)."""
        self._norm = math.nan
        can_fall = self.scaler is not None and self.scaler.can_fall
        updated, _, _ = self.optimizer.step()
        if not updated:
            self.skipped_steps += 1
        self.overflowed = can_fall and not updated and math.isnan(self._norm)
        return bool(updated), self._norm

    def _measured(self) -> Any:
        norm = self._measure()
        self._norm = float(norm)
        return norm

    def _apply_if_sound(self) -> bool:
        if not math.isfinite(self._norm) or self._norm > self._max_norm:
            return False
        return bool(self._apply())


def first_bad_parameter(chunks: Sequence[Any], groups: ParallelGroups) -> str | None:
    """Name the first parameter with a non-finite gradient, on any rank; a collective."""
    mine = None
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            gradient = getattr(parameter, "main_grad", None)
            if gradient is not None and not bool(torch.isfinite(gradient).all()):
                mine = (
                    mine or f"{name.removeprefix('module.')} (rank {groups.rank}, chunk {number})"
                )
    found: list[str | None] = [None] * groups.world_size
    dist.all_gather_object(found, mine)
    return next((name for name in found if name), None)


def gather_responses(
    results: Sequence[Tensor | None],
    microbatches: Sequence[PreparedMicrobatch],
    starts: Sequence[Integers],
    size: int,
    group: dist.ProcessGroup,
    groups: ParallelGroups,
    device: torch.device,
    trailing: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Gather per-token results [size, *trailing] of `group`, on its ranks of the last stage.

    results: on the last stage [R, *trailing] per microbatch, None where padding
    starts: per microbatch, where the response of each sample begins in the result
    Every position is written by exactly one rank, so a sum over ranks assembles them.
    """
    flat = torch.zeros((size, *trailing), dtype=dtype, device=device)
    if not groups.is_last_stage:
        return flat
    for result, microbatch, first in zip(results, microbatches, starts, strict=True):
        if result is None or microbatch.is_padding:
            continue
        shards = microbatch.inputs.shards
        places = torch.from_numpy(np.repeat(first, shards.held)).to(device) + shards.positions
        flat[places] = result
    if group.size() > 1:
        dist.all_reduce(flat, group=group)
    return flat
