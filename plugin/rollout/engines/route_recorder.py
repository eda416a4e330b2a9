"""Records which experts every token went to while an engine generates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from plugin.batch_types import route_dtype
from plugin.errors import EngineError


class RouteRecorder:
    """Hooks the routers of a transformers MoE model, in layer order.

    Each forward pass of [B, S] tokens leaves one [B * S, topk] tensor per router; `take` stacks
    them.
    """

    def __init__(self, model: nn.Module) -> None:
        routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
        if not routers:
            raise EngineError(
                f"{type(model).__name__} has no MoE router to record; drop "
                "--use-rollout-routing-replay"
            )
        self._dtype = route_dtype(int(routers[0].num_experts))  # type: ignore[arg-type]
        self._last: list[Tensor | None] = [None] * len(routers)
        self._handles = [
            router.register_forward_hook(self._hook(number))
            for number, router in enumerate(routers)
        ]

    def _hook(self, number: int) -> Any:
        def record(_module: nn.Module, _inputs: Any, output: tuple[Tensor, ...]) -> None:
            self._last[number] = output[-1].detach().to("cpu", self._dtype)

        return record

    def take(self, batch: int) -> Tensor:
        """[B, S, moe_layers, topk] routes of the latest forward pass."""
        missing = [number for number, routes in enumerate(self._last) if routes is None]
        if missing:
            raise EngineError(f"router {missing[0]} did not run in the last forward pass")
        stacked = torch.stack([routes for routes in self._last if routes is not None], dim=1)
        self._last = [None] * len(self._last)
        return stacked.view(batch, -1, *stacked.shape[1:])

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
