"""Records which experts every token went to, and with which weights, while an engine generates."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plugin.batch_types import route_dtype
from plugin.errors import EngineError


class RecordedRoutes(NamedTuple):
    """Experts and float32 weights, both [..., moe_layers, topk]."""

    experts: Tensor
    weights: Tensor

    def of_last_token(self) -> RecordedRoutes:
        """[B, 1, ...] of [B, S, ...]."""
        return RecordedRoutes(self.experts[:, -1:], self.weights[:, -1:])


class RouteRecorder:
    """Hooks the routers of a transformers MoE model, in layer order.

    Each forward pass of [B, S] tokens leaves two [B * S, topk] tensors per router; `take` stacks
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
        self._last: list[RecordedRoutes | None] = [None] * len(routers)
        self._handles = [
            router.register_forward_hook(self._hook(number))
            for number, router in enumerate(routers)
        ]

    def _hook(self, number: int) -> Any:
        def record(_module: nn.Module, _inputs: Any, output: tuple[Tensor, ...]) -> None:
            # logits, weights of the chosen experts as they are mixed, chosen experts
            _, weights, experts = output
            self._last[number] = RecordedRoutes(
                experts.detach().to("cpu", self._dtype), weights.detach().to("cpu", torch.float32)
            )

        return record

    def take(self, batch: int) -> RecordedRoutes:
        """[B, S, moe_layers, topk] routes of the latest forward pass."""
        missing = [number for number, routes in enumerate(self._last) if routes is None]
        if missing:
            raise EngineError(f"router {missing[0]} did not run in the last forward pass")
        by_layer = [routes for routes in self._last if routes is not None]
        self._last = [None] * len(self._last)
        stacked = [torch.stack(parts, dim=1) for parts in zip(*by_layer, strict=True)]
        return RecordedRoutes(*(part.view(batch, -1, *part.shape[1:]) for part in stacked))

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
