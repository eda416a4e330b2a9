"""Routes as servers report them, made to fit the protocol."""

from __future__ import annotations

import torch
from torch import Tensor

from plugin.errors import EngineError
from plugin.rollout.engine_protocol import smallest_unsigned


def complete_routes(routes: Tensor, length: int) -> Tensor:
    """`routes` [length - 1 or length, moe_layers, topk] as [length, moe_layers, topk] in the smallest type.

    An engine never reads the last token it samples and so has no route for it. No log-prob depends on that route; the row
    of the token before it stands in, because a replay needs a valid one.
    """
    if routes.dim() != 3 or len(routes) not in (length - 1, length) or not len(routes):
        raise EngineError(
            f"routed experts of shape {list(routes.shape)} where [{length - 1}, layers, topk] was expected"
        )
    routes = routes.to(torch.int64)
    if bool((routes < 0).any()):
        raise EngineError("routed experts hold a negative number: tokens without a recorded route")
    if len(routes) < length:
        routes = torch.cat([routes, routes[-1:]])
    return routes.to(smallest_unsigned(int(routes.max()) + 1))
