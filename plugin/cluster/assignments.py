"""Which engine has which groups, which may get more, and which make no progress with theirs."""

from __future__ import annotations

import heapq
import math
import time
from collections import defaultdict
from collections.abc import Iterable

from plugin.cluster.remote_calls import LONGEST_LOOK

_HUNG_CHECK_SECONDS = 1.0
#: Entries of a heap that may be outdated, besides four per engine.
_OUTDATED_LOADS = 64


class Assignments:
    """Which engine has which group, and since when; which engines may get more.

    patience: seconds without progress after which an engine that has groups counts as hung
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._engine_of: dict[int, int] = {}
        # Engine -> its groups with the time when they were sent, the oldest first.
        self._groups: defaultdict[int, dict[int, float]] = defaultdict(dict)
        self._last_progress: dict[int, float] = {}
        self._progress: dict[int, int] = {}
        self._checked = self._looks_since = -math.inf
        self._open: set[int] = set()
        # (groups, engine); what is no longer true is skipped when it comes up.
        self._by_load: list[tuple[int, int]] = []

    def load(self, engine: int) -> int:
        """How many groups an engine has."""
        return len(self._groups[engine])

    def set_open(self, engine: int, is_open: bool) -> None:
        """Set whether an engine may get groups."""
        if is_open and engine not in self._open:
            self._open.add(engine)
            self._note_load(engine)
        elif not is_open:
            self._open.discard(engine)

    def least_loaded(self) -> tuple[int, int] | None:
        """The open engine with the fewest groups, of several the first, and how many it has."""
        while self._by_load:
            load, engine = self._by_load[0]
            if engine in self._open and load == self.load(engine):
                return engine, load
            heapq.heappop(self._by_load)
        return None

    def _note_load(self, engine: int) -> None:
        if engine in self._open:
            heapq.heappush(self._by_load, (self.load(engine), engine))
        if len(self._by_load) > _OUTDATED_LOADS + 4 * len(self._open):
            self._by_load = [(self.load(engine), engine) for engine in self._open]
            heapq.heapify(self._by_load)

    def add(self, engine: int, groups: Iterable[int]) -> None:
        """Note that groups were sent to an engine."""
        now = time.monotonic()
        for group in groups:
            self._engine_of[group] = engine
            self._groups[engine][group] = now
        self._note_load(engine)

    def remove_answered(self, engine: int, groups: Iterable[int]) -> None:
        """Note that an engine has answered groups."""
        self._last_progress[engine] = time.monotonic()
        for group in groups:
            owner = self._engine_of.pop(group, None)
            if owner is not None:
                del self._groups[owner][group]
        self._note_load(engine)

    def note_progress(self, engine: int, progress: int) -> None:
        """Note how many tokens an engine has generated, now and then."""
        if progress != self._progress.get(engine):
            self._progress[engine] = progress
            self._last_progress[engine] = time.monotonic()

    def remove_lost(self, engine: int) -> list[int]:
        """Remove and return the groups of an engine that is gone."""
        lost = list(self._groups.pop(engine, ()))
        for group in lost:
            del self._engine_of[group]
        self._note_load(engine)
        return lost

    def hung(self) -> dict[int, str]:
        """Engines without progress for too long, with the reason to replace them.

        Looks at all engines once a second at most.
        """
        now = time.monotonic()
        if now - self._checked < min(_HUNG_CHECK_SECONDS, self._patience):
            return {}
        if LONGEST_LOOK < now - self._checked < math.inf:
            self._looks_since = now
        self._checked = now
        sent = {engine: next(iter(mine.values())) for engine, mine in self._groups.items() if mine}
        # One that generates is alive, however long a response takes.
        limit, last = now - self._patience, self._last_progress
        known = self._looks_since
        late = [n for n, since in sent.items() if max(since, last.get(n, 0), known) < limit]
        reason = f"generated nothing for {self._patience:g} s (--rollout-timeout)"
        return dict.fromkeys(late, reason)

    def clear(self) -> None:
        """Forget every group."""
        self._engine_of.clear()
        self._groups.clear()
        for engine in self._open:
            self._note_load(engine)
