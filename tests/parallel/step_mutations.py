"""Deliberate faults of the train step: the equality tests must notice every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from plugin.batch_types import Microbatch, RolloutBatch
from plugin.megatron_backend import trainer
from plugin.megatron_backend.step import batch_share
from plugin.megatron_backend.step.loss_scaling import LossScale
from plugin.megatron_backend.step.microbatching import MicrobatchPlan

_for_megatron = LossScale.for_megatron
_padding_like = Microbatch.padding_like.__func__  # type: ignore[attr-defined]
_plan = batch_share.plan_microbatches


def _without_factor(name: str) -> AbstractContextManager[Any]:
    def scaled(self: LossScale, total: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        return _for_megatron(replace(self, **{name: 1}), total, count)

    return patch.object(LossScale, "for_megatron", scaled)


def _count_of_one() -> AbstractContextManager[Any]:
    """A closure that does not tell Megatron how many tokens its sum is over."""

    def scaled(self: LossScale, total: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        loss, tokens = _for_megatron(self, total, count)
        return loss, tokens.new_ones(())

    return patch.object(LossScale, "for_megatron", scaled)


def _padding_changed(change: Callable[[RolloutBatch], RolloutBatch]) -> AbstractContextManager[Any]:
    def padding_like(cls: type[Microbatch], batch: RolloutBatch, **options: Any) -> Microbatch:
        padding = _padding_like(cls, batch, **options)
        return Microbatch(change(padding.batch), padding.is_padding)

    return patch.object(Microbatch, "padding_like", classmethod(padding_like))


def _without_field(name: str) -> Callable[[RolloutBatch], RolloutBatch]:
    return lambda batch: RolloutBatch({k: v for k, v in batch.columns.items() if k != name})


def _unmasked(batch: RolloutBatch) -> RolloutBatch:
    return batch.with_column("loss_masks", [mask + 1 for mask in batch.columns["loss_masks"]])


def _more_padding(extra: int) -> AbstractContextManager[Any]:
    """Not a fault: `extra` padding microbatches more on every rank, which must change nothing."""

    def plan(*args: Any, **options: Any) -> MicrobatchPlan:
        planned = _plan(*args, **options)
        padding: tuple[tuple[int, ...], ...] = ((),) * extra
        return replace(planned, ranks=tuple(padding + rank + padding for rank in planned.ranks))

    return patch.object(batch_share, "plan_microbatches", plan)


MUTATIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no num_microbatches": lambda: _without_factor("num_microbatches"),
    "no dp_cp_size": lambda: _without_factor("dp_cp_size"),
    "no total_weight": lambda: _without_factor("total_weight"),
    "no token count": _count_of_one,
    "unmasked padding": lambda: _padding_changed(_unmasked),
    "more padding": lambda: _more_padding(2),
    "statistics of microbatches": lambda: patch.object(
        trainer, "add_batch_statistics", lambda *_: None
    ),
}


@contextmanager
def applied(name: str | None) -> Iterator[None]:
    """With the named fault in place; `padding without FIELD` drops a field of padding microbatches."""
    if name is None:
        context: AbstractContextManager[Any] = nullcontext()
    elif name.startswith("padding without "):
        context = _padding_changed(_without_field(name.removeprefix("padding without ")))
    else:
        context = MUTATIONS[name]()
    with context:
        yield
