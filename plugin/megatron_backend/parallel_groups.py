"""Ranks, sizes and process groups of one rank: the only reader of Megatron's global parallel state.

Everything else takes a `ParallelGroups`, which makes it clear what a function communicates over and
lets it be called with any group, in a test or in somebody else's trainer.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from plugin.errors import ConfigError, ParallelError
from plugin.megatron_backend import cpu_runtime
from plugin.sharding.parallel_context import ParallelContext


@dataclass(frozen=True, eq=False)
class ParallelGroups:
    """Where this rank stands in every parallel dimension.

    With 8 ranks, TP2 and PP2: `tp_size == pp_size == dp_size == 2`; rank 5 has `tp_rank == 1`,
    `dp_rank == 0`, `pp_rank == 1`.
    """

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    tp_group: dist.ProcessGroup
    pp_rank: int
    pp_size: int
    pp_group: dist.ProcessGroup
    vpp_size: int | None
    """Model chunks per pipeline stage; None without virtual pipelining."""
    dp_rank: int
    dp_size: int
    dp_group: dist.ProcessGroup
    dp_cp_size: int
    dp_cp_group: dist.ProcessGroup
    """Data and context parallel ranks together: the ranks that hold the same non-expert weights."""
    cp_rank: int
    cp_size: int
    cp_group: dist.ProcessGroup
    ep_rank: int
    ep_size: int
    ep_group: dist.ProcessGroup
    etp_rank: int
    etp_size: int
    etp_group: dist.ProcessGroup
    """Tensor parallelism inside an expert."""
    collection: ProcessGroupCollection
    """The same groups in the form that Megatron-Core's modules take."""

    @property
    def is_first_stage(self) -> bool:
        """This rank holds the embedding (in its first chunk)."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """This rank computes the logits (in its last chunk)."""
        return self.pp_rank == self.pp_size - 1

    @property
    def num_chunks(self) -> int:
        """How many model chunks this rank builds."""
        return self.vpp_size or 1

    def starts_model(self, chunk: int = 0) -> bool:
        """Whether chunk number `chunk` of this rank is the one with the embedding."""
        return self.is_first_stage and chunk == 0

    def ends_model(self, chunk: int = 0) -> bool:
        """Whether chunk number `chunk` of this rank is the one with the output layer."""
        return self.is_last_stage and chunk == self.num_chunks - 1


def init_parallel(
    rank: int,
    world_size: int,
    *,
    init_method: str,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    backend: str | None = None,
    timeout_seconds: float = 600.0,
) -> ParallelGroups:
    """Join the process group and build Megatron's groups; collective over all `world_size` ranks.

    `init_method` is a torch rendezvous address (`tcp://host:port`, `file:///path`). The backend is
    nccl where CUDA is available and gloo elsewhere. Every collective fails after `timeout_seconds`.
    """
    tp, pp, cp = (
        tensor_model_parallel_size,
        pipeline_model_parallel_size,
        context_parallel_size,
    )
    ep, etp = expert_model_parallel_size, expert_tensor_parallel_size or tp
    # Before any rank waits for another.
    for product, names, sizes in (
        (tp * pp * cp, "tensor x pipeline x context parallel sizes", f"{tp} x {pp} x {cp}"),
        (ep * etp * pp, "expert x expert-tensor x pipeline parallel sizes", f"{ep} x {etp} x {pp}"),
    ):
        if product < 1 or world_size % product:
            raise ConfigError(
                f"{names} are {sizes} = {product}, which must divide the {world_size} ranks; "
                "change a size or the number of ranks"
            )
    if (virtual_pipeline_model_parallel_size or 1) > 1 and pp < 2:
        raise ConfigError(
            f"virtual pipeline size {virtual_pipeline_model_parallel_size} needs a pipeline size "
            f"of at least 2, not {pp}; drop --virtual-pipeline-model-parallel-size or raise "
            "--pipeline-model-parallel-size"
        )
    on_cpu = cpu_runtime.activate()
    if dist.is_initialized():
        raise ParallelError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} already joined a process group; "
            "call destroy_parallel() before init_parallel()"
        )
    if not on_cpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count())))
    dist.init_process_group(
        backend or ("gloo" if on_cpu else "nccl"),
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size,
        context_parallel_size=context_parallel_size,
        expert_model_parallel_size=expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size,
        distributed_timeout_minutes=timeout_seconds / 60,
    )
    return read_parallel_groups()


def read_parallel_groups() -> ParallelGroups:
    """This rank's place, read from Megatron's global state (which must be initialized)."""
    if not parallel_state.model_parallel_is_initialized():
        raise ParallelError(
            "Megatron's parallel state is not initialized; call init_parallel() on every rank first"
        )
    collection = ProcessGroupCollection.use_mpu_process_groups()
    places: dict[str, Any] = {}
    for name, group in (
        ("tp", collection.tp),
        ("pp", collection.pp),
        ("dp", collection.dp),
        ("cp", collection.cp),
        ("ep", collection.ep),
        ("etp", collection.expt_tp),
    ):
        places[f"{name}_rank"], places[f"{name}_size"] = group.rank(), group.size()
        places[f"{name}_group"] = group
    return ParallelGroups(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        vpp_size=parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        dp_cp_size=collection.dp_cp.size(),
        dp_cp_group=collection.dp_cp,
        collection=collection,
        **places,
    )


def destroy_parallel() -> None:
    """Undo `init_parallel`; safe to call when nothing was initialized."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def one_process() -> Iterator[ParallelGroups]:
    """The groups of a single process, initialized inside the body."""
    with tempfile.TemporaryDirectory(prefix="megatron-tis-") as directory:
        try:
            yield init_parallel(0, 1, init_method=f"file://{directory}/rendezvous")
        finally:
            destroy_parallel()


def loss_context(groups: ParallelGroups) -> ParallelContext:
    """The groups that the loss and the corrections need; one rank counts as not split."""
    return ParallelContext(
        tp_group=groups.tp_group if groups.tp_size > 1 else None,
        cp_group=groups.cp_group if groups.cp_size > 1 else None,
        cp_rank=groups.cp_rank,
        cp_size=groups.cp_size,
    )
