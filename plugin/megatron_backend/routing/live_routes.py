"""The experts that the trainer's routers would choose by themselves, gathered from all ranks.

Compared with the engine's routes on the driver they say whether engine and trainer route alike, and
if not, why. The first samples of a batch are enough to judge, so only those are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class LiveRoutes:
    """Filled by the routers during one schedule; `gathered` is a collective."""

    def __init__(
        self,
        num_layers: int,
        topk: int,
        lengths: Sequence[int],
        places: Sequence[Tensor],
        device: torch.device,
    ) -> None:
        """Watch the first samples of the global batch, whose total lengths are `lengths`.

        places: per microbatch of this rank [rows], which token of the global batch a row is;
            negative or past the end where it is padding
        """
        self._lengths = list(lengths)
        tokens = sum(self._lengths)
        watched = [(place >= 0) & (place < tokens) for place in places]
        # One row more takes what is not watched: no mask, and so no wait for the device.
        self._experts = torch.full(
            (tokens + 1, num_layers, topk), -1, dtype=torch.int32, device=device
        )
        self._places = [
            torch.where(inside, place, tokens).to(device)
            for place, inside in zip(places, watched, strict=True)
        ]
        self._watched = [bool(inside.any()) for inside in watched]

    def add(self, number: int, layer: int, chosen: Tensor) -> None:
        """Experts [rows, topk] that the router of `layer` chose for microbatch `number`."""
        if self._watched[number]:
            self._experts[self._places[number], layer] = chosen.to(torch.int32)

    def gathered(self) -> list[Tensor]:
        """Routes [tokens, layers, topk] of the first samples; -1 where no router was asked."""
        experts = self._experts[:-1]
        # Ranks that see a token all route it alike; a rank that has not seen it has -1.
        dist.all_reduce(experts, op=dist.ReduceOp.MAX)
        return list(experts.cpu().split(self._lengths))
