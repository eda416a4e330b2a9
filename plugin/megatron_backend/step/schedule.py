"""Run stock Megatron schedules, and gather what their last stage computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from plugin.megatron_backend.parallel_groups import ParallelGroups
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
