"""What a real rank holds, sends and allocates in a step, measured without the planner's own tools."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from plugin.config import TrainerConfig
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.trainer import MegatronTrainer
from plugin.tools.plan.planned_rank import (
    MeasuredRank,
    built_rank,
    count_parameters,
    resident_bytes,
)
from plugin.tools.plan.workload import full_share
from tests.parallel import tiny_models

_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
}
#: Which argument of an operation is what this rank puts in.
_INPUT = {"_allgather_base_": 1, "allgather_": 1, "allgather_into_tensor_coalesced_": 1,
          "_reduce_scatter_base_": 1, "reduce_scatter_": 1, "reduce_scatter_tensor_coalesced_": 1,
          "alltoall_base_": 1, "alltoall_": 1}  # fmt: skip


@dataclass(frozen=True)
class PlanCase:
    """A layout and a model on `ranks` ranks; wide enough that activations dwarf a microbatch's own columns."""

    ranks: int
    family: str = "qwen3"
    settings: dict[str, Any] = field(default_factory=dict)
    microbatches: int = 3
    padding: int = 0
    microbatch: tuple[int, ...] = (48, 48)

    def config(self) -> TrainerConfig:
        return TrainerConfig.from_sources(
            {"max_tokens_per_gpu": 96, "micro_batch_size": 2, **self.settings}
        )

    def hf_config(self) -> Any:
        return tiny_models.FAMILIES[self.family](
            hidden_size=64, vocab_size=512, intermediate_size=128
        )

    def share(self, trainer: MegatronTrainer) -> Any:
        routed = trainer.routed_model
        return full_share(
            trainer.config, trainer.hf_config, np.array(self.microbatch), 0.75,
            microbatches=self.microbatches, padding=self.padding,
            route_layers=None if routed is None else routed.route_layers,
        )  # fmt: skip


class Counter(TorchDispatchMode):
    """Counts the collectives that reach torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[tuple[str, str], list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.split("::")[1]
            if name in _NAMES:
                boxed = next(
                    a
                    for a in args
                    if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())
                )
                group = dist.ProcessGroup.unbox(boxed)
                if group.size() > 1:
                    put_in = tree_flatten(args[_INPUT.get(name, 0)])[0]
                    label = {"default_pg": "world"}.get(group.group_desc, group.group_desc)
                    entry = self.counts.setdefault((label, _NAMES[name]), [0, 0])
                    entry[0] += 1
                    entry[1] += sum(t.numel() * t.element_size() for t in put_in)
        return func(*args, **(kwargs or {}))


class LiveStorages(TorchDispatchMode):
    """Bytes of the storages that operations have made and nobody has freed, and their largest sum."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note(args, kwargs, made=False)  # what was there before the step
        result = func(*args, **(kwargs or {}))
        self._note(result, made=True)
        return result

    def _note(self, *trees: Any, made: bool) -> None:
        for tensor in (leaf for leaf in tree_flatten(trees)[0] if isinstance(leaf, torch.Tensor)):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes() if made else 0
            if key not in self._known:
                self._known[key] = weakref.ref(storage, partial(self._freed, key, size))
                self.live += size
                self.peak = max(self.peak, self.live)

    def _freed(self, key: int, size: int, _: Any) -> None:
        del self._known[key]
        self.live -= size


@contextmanager
def peak_of_allocator(found: list[int]) -> Iterator[None]:
    """Appends the allocator's peak, by torch's profiler. It sees one thread: gloo's free what they have sent."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorder:
        yield
    events = recorder.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    ordered = sorted(changes, key=lambda change: change[0])
    found.append(int(np.cumsum([size for _, size in ordered]).max()))


@contextmanager
def peak_of_storages(found: list[int]) -> Iterator[None]:
    with LiveStorages() as storages:
        yield
    found.append(storages.peak)


def run_for_real(groups: ParallelGroups, case: PlanCase) -> MeasuredRank:
    """Train two steps on this rank: count the collectives of one and the memory of the other."""
    config, hf_config = case.config(), case.hf_config()
    trainer = MegatronTrainer(config, hf_config, groups)
    with Counter() as counter:
        trainer.train_step(case.share(trainer))
    share, step, peaks = case.share(trainer), trainer.optimizer.step, []
    measured = peak_of_allocator(peaks) if case.ranks == 1 else peak_of_storages(peaks)

    def optimize() -> Any:
        measured.__exit__(None, None, None)
        return step()

    trainer.optimizer.step = optimize
    measured.__enter__()
    trainer.train_step(share)
    return MeasuredRank(
        groups.rank,
        count_parameters(trainer.chunks),
        resident_bytes(trainer.chunks, trainer.optimizer.optimizer),
        activations=peaks[0],
        collectives={key: (n, size) for key, (n, size) in counter.counts.items()},
    )


def plan_rank(rank: int, case: PlanCase, object_bytes: int = 0) -> MeasuredRank:
    """The same rank, planned; object_bytes: of the metrics that the last stage sends to the others."""
    config, hf_config = case.config(), case.hf_config()
    with built_rank(rank, case.ranks, config, hf_config, "packed", on_gpu=False) as planned:
        planned.traffic.object_bytes = object_bytes
        return planned.measured(case.share, with_log_probs=False)
