"""The experts that the trainer's routers would choose by themselves, brought together from all ranks.

Compared with the engine's routes on the driver they say whether engine and trainer route alike, and if not, why. The
first samples of a batch are enough to judge, so only those are kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

MAX_TOKENS = 4096


class LiveRoutes:
    """Filled by the routers during one schedule; `gathered` is a collective."""

    def __init__(
        self,
        num_layers: int,
        topk: int,
        total_lengths: Sequence[int],
        places: Sequence[Tensor],
        device: torch.device,
    ) -> None:
        """`places`: per microbatch of this rank [rows], see `token_places`."""
        self._lengths = watched_lengths(total_lengths)
        rows = sum(self._lengths)
        # One row more takes in what is not watched: no mask, and so no wait for the device.
        self._experts = torch.full(
            (rows + 1, num_layers, topk), -1, dtype=torch.int32, device=device
        )
        self._places = [torch.where(place < rows, place, rows).to(device) for place in places]
        self._watched = [bool((place < rows).any()) for place in places]

    def add(self, number: int, layer: int, chosen: Tensor) -> None:
        """Experts [rows, topk] that the router of `layer` chose for microbatch `number`."""
        if self._watched[number]:
            self._experts[self._places[number], layer] = chosen.to(torch.int32)

    def gathered(self) -> list[Tensor]:
        """Routes [tokens, layers, topk] of the first samples of the global batch; -1 where no router was asked."""
        experts = self._experts[:-1]
        # A token that several ranks see is routed alike on all of them; where a rank has not seen it, it has -1.
        dist.all_reduce(experts, op=dist.ReduceOp.MAX)
        return list(experts.to(torch.int16).cpu().split(self._lengths))


def watched_lengths(total_lengths: Sequence[int]) -> list[int]:
    """Lengths of the first samples, up to `MAX_TOKENS` together and at least one."""
    ends = itertools.accumulate(total_lengths)
    count = sum(end <= MAX_TOKENS for end in ends)
    return [int(length) for length in total_lengths[: max(1, count)]]


def token_places(
    starts: Tensor,
    samples: Sequence[int],
    sample_ids: Tensor,
    positions: Tensor,
) -> Tensor:
    """For every row that a router sees, which token of the global batch it is; past the end where it is padding.

    starts: first token of every sample of the global batch, and their count at the end
    samples: the global samples of a microbatch, none if all of it is padding
    sample_ids: [rows] index into them or -1; positions: [rows] within a sample
    """
    if not samples:
        return starts[-1].expand(len(sample_ids))
    places = starts[torch.tensor(samples)[sample_ids]] + positions
    return torch.where(sample_ids >= 0, places, starts[-1])
