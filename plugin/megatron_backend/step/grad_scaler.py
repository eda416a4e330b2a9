"""The loss scale of float16 training, shared by the optimizers of a rank.

The loss is multiplied by a scale before the backward pass, so that small gradients do not become 0
in float16, and the float32 main gradients are divided by it. The scaler itself is Megatron-Core's.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler, MegatronGradScaler
from torch import Tensor


class SharedGradScaler:
    """One of Megatron's scalers for several optimizers; updated once they all have looked.

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
        """Whether an overflow brings the scale, or its hysteresis, nearer to one that fits."""
        scaler = self._scaler
        return isinstance(scaler, DynamicGradScaler) and bool(scaler.scale > scaler.min_scale)

    def update(self, found_inf: bool) -> None:
        """An optimizer has found infinite gradients, or none; the last one moves the scale."""
        self._found.append(found_inf)
        if len(self._found) == self._users:
            self._scaler.update(any(self._found))
            self._found.clear()

    def state_dict(self) -> dict[str, Any]:
        """As Megatron's scaler has it."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` returned."""
        self._scaler.load_state_dict(state)

    def numbers(self) -> dict[str, float] | None:
        """The state of a dynamic scale as plain numbers; None of a constant one."""
        return {name: float(value) for name, value in self.state_dict().items()} or None

    def restore(self, numbers: dict[str, float]) -> None:
        """Go on from `numbers`; a constant scale stays what its flag says."""
        if isinstance(self._scaler, DynamicGradScaler):
            self.load_state_dict(
                {
                    "scale": torch.tensor([numbers["scale"]], dtype=torch.float32),
                    "growth_tracker": int(numbers["growth_tracker"]),
                    "hysteresis_tracker": int(numbers["hysteresis_tracker"]),
                }
            )
