"""Sums, counts and maxima that can be added over microbatches and ranks without losing exactness.

A mean of means depends on how a batch was cut; a sum and a count do not. Every metric is therefore
kept as cells of one of two kinds, sums and maxima (a minimum is the maximum of the negated value),
in float64, and divided only at the very end. A step packs all its cells into one tensor for one
collective.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor

from plugin.ppo_utils.masked_ops import masked_max, zero_masked

#: Up to this many ranks a table is gathered whole and added in the order of ranks: one collective.
GATHER_LIMIT = 64


class StatisticsTable:
    """Named cells of sums and maxima; a cell is a float64 tensor of any fixed shape."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor | float) -> None:
        """Add to a sum cell."""
        value = torch.as_tensor(value, device=self.device).detach().double()
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def maximum(self, name: str, value: Tensor | float) -> None:
        """Raise a maximum cell."""
        value = torch.as_tensor(value, device=self.device).detach().double()
        self.maxima[name] = (
            torch.maximum(self.maxima[name], value) if name in self.maxima else value
        )

    def add_mean(self, name: str, values: Tensor, over: Tensor) -> None:
        """Contribute [T] values to the mean `name` over the tokens where `over` is True."""
        self.add(f"{name}:sum", zero_masked(values.detach(), over).double().sum())
        self.add(f"{name}:count", over.sum())

    def add_extremes(self, name: str, values: Tensor, over: Tensor) -> None:
        """Contribute [T] values to the true maximum and minimum of `name`."""
        self.maximum(f"{name}:max", masked_max(values.detach(), over))
        self.maximum(f"{name}:-min", masked_max(-values.detach(), over))

    def merge(self, other: StatisticsTable) -> None:
        """Take in the cells of another table."""
        for name, value in other.sums.items():
            self.add(name, value)
        for name, value in other.maxima.items():
            self.maximum(name, value)

    def _cells(self) -> list[tuple[str, str, Tensor]]:
        """Kind, name and values of every cell: sums first, each kind in the order of the names."""
        return [
            (kind, name, cells[name])
            for kind, cells in (("sums", self.sums), ("maxima", self.maxima))
            for name in sorted(cells)
        ]

    def digest(self) -> int:
        """Hash names and shapes of the cells: equal on two ranks only if they hold the same."""
        described = [(kind, name, tuple(cell.shape)) for kind, name, cell in self._cells()]
        return int.from_bytes(hashlib.sha256(repr(described).encode()).digest()[:6], "big")

    def packed(self) -> Tensor:
        """All cells in one flat float64 tensor, in the order of `_cells`."""
        none = torch.zeros(0, dtype=torch.float64, device=self.device)
        return torch.cat([none, *(cell.reshape(-1) for _, _, cell in self._cells())])

    def reduced(self, group: dist.ProcessGroup | None) -> StatisticsTable:
        """Reduce over `group`: the same bits on each rank. All must hold the same cells."""
        mine = self.packed()
        if group is None or group.size() == 1:
            return self._from_rows(mine[None])
        if group.size() > GATHER_LIMIT:
            # Sums and maxima apart: two collectives of a size that does not grow with the ranks.
            count = sum(cell.numel() for cell in self.sums.values())
            dist.all_reduce(mine[:count], group=group)
            dist.all_reduce(mine[count:], op=dist.ReduceOp.MAX, group=group)
            return self._from_rows(mine[None])
        rows = mine.new_empty(group.size() * mine.numel())
        dist.all_gather_into_tensor(rows, mine, group=group)
        return self._from_rows(rows.view(group.size(), -1))

    def means(self) -> dict[str, float]:
        """Return pairs of `:sum` and `:count` as means, and scalar extremes; an empty mean is 0.

        Cells with a shape (histograms, tables) are left to whoever recorded them.
        """
        values: dict[str, float] = {}
        for name, total in self.sums.items():
            if name.endswith(":sum"):
                base = name.removesuffix(":sum")
                # A count may be a sum of weights below 1; only an empty one is 0.
                count = self.sums[f"{base}:count"]
                values[base] = float(total / count) if float(count) > 0 else 0.0
        for name, value in self.maxima.items():
            if value.dim():
                continue
            base, _, kind = name.rpartition(":")
            values[f"{base}_{kind.lstrip('-')}"] = -float(value) if kind[0] == "-" else float(value)
        return values

    def _from_rows(self, rows: Tensor) -> StatisticsTable:
        """The table that packed tables [ranks, n] add up to."""
        table, offset = StatisticsTable("cpu"), 0
        rows = rows.cpu()
        for kind, name, cell in self._cells():
            block = rows[:, offset : offset + cell.numel()]
            offset += cell.numel()
            combined = block.sum(0) if kind == "sums" else block.amax(0)
            getattr(table, kind)[name] = combined.reshape(cell.shape)
        return table
