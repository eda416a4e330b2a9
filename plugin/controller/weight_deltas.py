"""Which versions deltas may follow: what trainer ranks sent last, and what every engine has."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from plugin.errors import WeightError


@dataclass(frozen=True)
class _Held:
    """A whole version at an engine, and how many deltas since its last full one led to it."""

    version: int
    deltas: int = 0


class DeltaBases:
    """Decides between a delta and a full version; in doubt it is a full one.

    full_every: how many versions a full one is followed by, itself included
    """

    def __init__(self, full_every: int) -> None:
        self._full_every = full_every
        self._engines: dict[Any, _Held] = {}
        self._ranks: Sequence[Any] = ()
        self._sent: int | None = None
        self._begun: dict[Any, _Held] = {}
        self._since: int | None = None
        self._failed: set[Any] = set()

    def begin(self, engines: Collection[Any], ranks: Sequence[Any]) -> int | None:
        """The version that all of them have, for a delta from there; None = send a full one.

        Until the transfer has ended well, nobody has a whole version.
        """
        self._begun = {e: self._engines.pop(e) for e in engines if e in self._engines}
        self._since = None
        if len(self._begun) == len(engines) and ranks == self._ranks:
            found = {held.version for held in self._begun.values()} | {self._sent}
            full_is_due = any(h.deltas + 1 >= self._full_every for h in self._begun.values())
            self._since = found.pop() if len(found) == 1 and not full_is_due else None
        self._ranks, self._sent = ranks, None
        return self._since

    def has_sent(self, version: int) -> None:
        """Note that every rank has sent its part."""
        self._sent = version

    def has_received(self, engine: Any, version: int) -> None:
        """Note that an engine has all of a version."""
        deltas = 0 if self._since is None else self._begun[engine].deltas + 1
        self._engines[engine] = _Held(version, deltas)
        if self._since is not None:
            self._failed.discard(engine)

    def has_failed(self, engine: Any, reason: str) -> None:
        """Note that a delta did not lead to the trainer's weights; twice in a row is an error."""
        if engine in self._failed:
            raise WeightError(
                f"{reason}; so did its last delta, although a full version came in between: this "
                "engine does not keep the weights as it gets them; use --weight-sync broadcast"
            )
        self._failed.add(engine)
