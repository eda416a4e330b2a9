"""Which of several engines or servers is asked: the one that holds the prefix, or the idlest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import TypeVar

#: Requests by which the holder of a prefix may be busier than the idlest before that one is asked.
SLACK = 16
_REMEMBERED = 100_000

Place = TypeVar("Place", bound=Hashable)


class PrefixRouter:
    """Remembers where each prefix was sent: the requests of one prompt, and later turns of an
    episode, find its keys and values there.

    slack: see `SLACK`; remembered: prefixes that are kept, those used last
    """

    def __init__(self, slack: int = SLACK, remembered: int = _REMEMBERED) -> None:
        self._slack, self._remembered = slack, remembered
        self._homes: OrderedDict[Hashable, Hashable] = OrderedDict()

    def choose(self, prefix: Hashable | None, loads: Mapping[Place, int]) -> Place | None:
        """Return the place to ask, None if there is none.

        prefix: what the request shares with others; None = nothing
        loads: requests under way at every place that may be asked; of equals the first is taken
        """
        if not loads:
            return None
        idlest = min(loads, key=lambda place: loads[place])
        chosen = idlest
        for place, load in loads.items():
            if prefix is not None and place == self._homes.get(prefix, _NOWHERE):
                chosen = place if load - loads[idlest] <= self._slack else idlest
        if prefix is not None:
            self._homes[prefix] = chosen
            self._homes.move_to_end(prefix)
            if len(self._homes) > self._remembered:
                self._homes.popitem(last=False)
        return chosen

    def forget(self, place: Hashable) -> None:
        """Drop what was sent to a place that has lost it."""
        for prefix in [prefix for prefix, home in self._homes.items() if home == place]:
            del self._homes[prefix]


_NOWHERE = object()
