"""The optimizer step: applied only if the gradient is finite and not too large; else, why not.

In float16 the loss is multiplied by a scale before the backward pass, so that small gradients do
not become 0, and the float32 main gradients are divided by it. The scaler itself is Megatron-Core's
and shared by the optimizers of a rank. The cause of a skipped step is searched for only after the
skip, so that other steps do not pay for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler, MegatronGradScaler
from torch import Tensor

from plugin.config import TrainerConfig
from plugin.loss.inputs import KnownTokens
from plugin.loss.partial_objective import first_non_finite
from plugin.megatron_backend.parallel_groups import ParallelGroups, loss_context
from plugin.megatron_backend.step.preparation import PreparedMicrobatch
from plugin.megatron_backend.step.rank_agreement import ErrorCollector
from plugin.ragged import Integers
from plugin.sharding.parallel_context import use_parallel_context


class SharedGradScaler:
    """One of Megatron's scalers for several optimizers; updated once all of them have reported.

    Megatron makes one for the dense and another one for the expert weights, scales the loss by the
    first, and each optimizer divides by its own. After an overflow in the experts alone, these
    would be divided by a scale that the loss was never multiplied by.
    """

    def __init__(self, scaler: MegatronGradScaler, users: int) -> None:
        self._scaler, self._users = scaler, users
        self._found: list[bool] = []

    @classmethod
    def of(cls, optimizer: MegatronOptimizer) -> SharedGradScaler | None:
        """Have all parts of `optimizer` use the scaler of the first; None where none has one."""
        parts: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
        scaled = [part for part in parts if getattr(part, "grad_scaler", None) is not None]
        if not scaled:
            return None
        shared = cls(scaled[0].grad_scaler, len(scaled))
        for part in scaled:
            part.grad_scaler = shared
        return shared

    @property
    def scale(self) -> Tensor:
        """[1] float32: what the loss is multiplied by."""
        return self._scaler.scale

    @property
    def inv_scale(self) -> Tensor:
        """[1] float32: what gradients are multiplied by."""
        return self._scaler.inv_scale

    @property
    def can_fall(self) -> bool:
        """Whether an overflow can still lower the scale, at once or after its hysteresis."""
        scaler = self._scaler
        return isinstance(scaler, DynamicGradScaler) and bool(scaler.scale > scaler.min_scale)

    def update(self, found_inf: bool) -> None:
        """Note whether an optimizer found infinite gradients; the last one updates the scale."""
        self._found.append(found_inf)
        if len(self._found) == self._users:
            self._scaler.update(any(self._found))
            self._found.clear()

    def state_dict(self) -> dict[str, Any]:
        """The state of Megatron's scaler."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` returned."""
        self._scaler.load_state_dict(state)

    def numbers(self) -> dict[str, float] | None:
        """The state of a dynamic scale as plain numbers; None of a constant one."""
        return {name: float(value) for name, value in self.state_dict().items()} or None

    def restore(self, numbers: dict[str, float]) -> None:
        """Continue from `numbers`; a constant scale keeps its flag's value."""
        if isinstance(self._scaler, DynamicGradScaler):
            self.load_state_dict(
                {
                    "scale": torch.tensor([numbers["scale"]], dtype=torch.float32),
                    "growth_tracker": int(numbers["growth_tracker"]),
                    "hysteresis_tracker": int(numbers["hysteresis_tracker"]),
                }
            )


def connect(chunks: Sequence[Any], optimizer: MegatronOptimizer) -> None:
    """Tell the model's config how to scale losses and how to finish gradients."""
    for chunk in chunks:
        chunk.config.grad_scale_func = optimizer.scale_loss
        chunk.config.finalize_model_grads_func = finalize_model_grads


class GuardedOptimizer:
    """A Megatron optimizer that skips a step whose gradient norm is not finite or too large.

    `optimizer.step()` stays Megatron's own; only its last part, applying the clipped gradients, is
    conditional. The norm is reduced over all ranks, so all make the same decision. In float16
    Megatron itself skips what overflows, before there is a norm; its parts share one scaler.
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


_TERMS = ("pg_loss", "entropy_loss", "kl_loss", "rollout_kl", "distill_kl", "loss")


def cause_of_skip(
    config: TrainerConfig,
    groups: ParallelGroups,
    microbatches: Sequence[PreparedMicrobatch],
    samples: Sequence[Integers],
    log_probs: Sequence[Tensor | None],
    metrics: Mapping[str, float],
) -> str | None:
    """Name the field, loss or hook that was not finite first, on any rank; a collective.

    samples: global sample of each, per microbatch; log_probs: on the last stage [R] per
        microbatch, None where padding; metrics: of the step
    None: everything that the loss computes is finite, the fault is in the model's backward pass.
    """
    mine: str | None = None
    if groups.is_last_stage:
        for microbatch, indices, cur in zip(microbatches, samples, log_probs, strict=True):
            # Every microbatch on every rank, also after one is found: hooks may communicate.
            with (
                ErrorCollector().collecting(peers=groups.cp_size),
                use_parallel_context(loss_context(groups)),
            ):
                known = KnownTokens.of(config, microbatch.columns, microbatch.inputs.shards)
                own = torch.zeros_like(known.mask, dtype=torch.float32) if cur is None else cur
                found = first_non_finite(config, known, own)
                if found is not None and mine is None:
                    place = f"sample {indices[found.sample]}, position {found.position}"
                    mine = f"{found.source} is not finite at {place}"
    everywhere: list[str | None] = [None] * groups.world_size
    dist.all_gather_object(everywhere, mine)
    terms = [name for name in _TERMS if not math.isfinite(metrics.get(name, 0.0))]
    once = f"{terms[0]} is not finite, but it is when computed again" if terms else None
    return next((text for text in everywhere if text), once)
