"""The routers of the live model, matched to layers by number, and what their routes look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.moe.router import TopKRouter

from plugin.errors import ReplayError
from plugin.megatron_backend.model.builder import unwrap


@dataclass(frozen=True)
class RoutedModel:
    """The routers of this rank's live chunks and what the whole model looks like.

    routers: index among all MoE layers of the model (not of this stage) -> router
    """

    routers: dict[int, TopKRouter]
    num_layers: int
    num_experts: int
    topk: int
    #: What the weights of a token sum up to in every layer; None where the router fixes no sum.
    weight_sum: float | None = None

    @property
    def route_layers(self) -> list[int]:
        """The MoE layers whose routes this rank is given: its own.

        A stage without any gets those of the first, which say which tokens have a route.
        """
        return sorted(self.routers) or [0]

    @classmethod
    def of(cls, chunks: Sequence[Any]) -> RoutedModel:
        """Find the routers by walking the live model; refuse what replay could not reach."""
        config = unwrap(chunks[0]).config
        mtp_layers = getattr(config, "mtp_num_layers", None)
        for refused, reason in (
            (
                not config.num_moe_experts,
                "routing replay needs a MoE model, and this one is dense; drop the replay flag",
            ),
            (
                config.moe_router_fusion,
                "--moe-router-fusion chooses experts in a fused kernel that never asks for "
                "replayed routes; turn it off",
            ),
            (
                config.moe_router_load_balancing_type == "sinkhorn",
                "sinkhorn load balancing never asks for replayed routes; use another type",
            ),
            (
                mtp_layers,
                f"{mtp_layers} MTP layers number themselves like decoder layers, so routes cannot "
                "be told apart; train without MTP",
            ),
        ):
            if refused:
                raise ReplayError(reason)
        pattern = config.moe_layer_freq
        if isinstance(pattern, int):
            pattern = [i % pattern == 0 for i in range(config.num_layers)]
        # Layer numbers are 1-based, as routers carry them.
        moe_layers = [i + 1 for i, is_moe in enumerate(pattern) if is_moe]
        routers: dict[int, TopKRouter] = {}
        modules = (pair for chunk in chunks for pair in unwrap(chunk).named_modules())
        for name, module in modules:
            if not isinstance(module, TopKRouter):
                continue
            number = module.layer_number
            if number not in moe_layers:
                raise ReplayError(
                    f"router {name} says it is layer {number}, which is no MoE layer of the model; "
                    "it would run without routes"
                )
            index = moe_layers.index(number)
            if index in routers:
                raise ReplayError(f"router {name} and another one both say they are layer {number}")
            routers[index] = module
        return cls(
            routers,
            len(moe_layers),
            config.num_moe_experts,
            config.moe_router_topk,
            _weight_sum(config),
        )


def _weight_sum(config: Any) -> float | None:
    """Softmax over the chosen experts and normalized sigmoids sum up to 1 before scaling."""
    softmax = config.moe_router_score_function == "softmax"
    if config.moe_router_pre_softmax if softmax else config.moe_router_topk == 1:
        return None
    return float(config.moe_router_topk_scaling_factor or 1.0)
