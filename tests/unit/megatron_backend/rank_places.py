"""A rank's place in a layout without processes, for what communicates with nobody."""

from __future__ import annotations

from typing import Any

from plugin.megatron_backend.parallel_groups import ParallelGroups


def place(**sizes: int) -> ParallelGroups:
    """A rank's place as numbers, without groups."""
    names = ("tp", "pp", "dp", "cp", "ep", "etp")
    values: dict[str, Any] = {"rank": 0, "world_size": 1, "vpp_size": None, "dp_cp_size": 1}
    values |= {
        f"{name}_{what}": 0 if what == "rank" else 1 for name in names for what in ("rank", "size")
    }
    values |= {f"{name}_group": None for name in (*names, "dp_cp")}
    return ParallelGroups(**{**values, "collection": None, **sizes})
