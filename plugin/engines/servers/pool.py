"""Which of several servers is asked next, and which are out of service.

One that holds the prefix of a request is asked before the idlest.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from plugin.engines.servers.calls import CallRefused, MalformedAnswer, ServerGone, ServerTrouble

_LOG = logging.getLogger(__name__)

#: How often those look that wait for a server whose weights change.
UPDATE_POLL_SECONDS = 0.02
_LONGEST_BACKOFF = 15.0
_TROUBLES_UNTIL_OUT = 3
_FIRST_PROBE_SECONDS, _LAST_PROBE_SECONDS = 1.0, 30.0
#: Requests by which the holder of a prefix may be busier than the idlest before that one is asked.
SLACK = 16
_REMEMBERED = 100_000

Place = TypeVar("Place", bound=Hashable)
T = TypeVar("T")


@dataclass(eq=False)
class Server:
    """One server and its state.

    failed_calls: of all, with bad answers
    troubles: failures in a row, where those of calls that began before the last one was known count
        once
    out_because: why it is not asked; None while it is in service
    probe_at: when an answer is looked for again (`time.monotonic`)
    tested: whether its log-probs are known to be of the sampled distribution
    label: of the weights it has; None while they are unknown or change
    interrupted_at: the label that it had right before an update interrupted its responses
    updating: held while its weights change
    workers: broadcast: of the server, which receive weights; 0 while it does not answer
    reloaded: got its weights between two versions, and has answered no probe since
    reports_progress: whether its metrics tell that it generates; None while that is not known
    progress, progressed_at: these metrics, and when they last changed (`time.monotonic`)
    is_silent: whether they stayed as they were for too long while it had requests
    """

    url: str
    in_flight: int = 0
    failed_calls: int = 0
    troubles: int = 0
    out_because: str | None = "no weights yet"
    probe_at: float = 0.0
    probe_delay: float = _FIRST_PROBE_SECONDS
    tested: bool = False
    label: str | None = None
    interrupted_at: str | None = None
    updating: threading.Lock = field(default_factory=threading.Lock, repr=False)
    workers: int = 0
    reloaded: bool = False
    reports_progress: bool | None = None
    progress: tuple[str, ...] = ()
    progressed_at: float = 0.0
    is_silent: bool = False


class FailedCall(Exception):
    """A call that failed, and was counted: which server, and why."""


class WeightsChanged(Exception):
    """The server got new weights before the response was complete, which is not used."""


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
        chosen = idlest = min(loads, key=lambda place: loads[place])
        if prefix is not None:
            home: Any = self._homes.get(prefix)
            if home in loads and loads[home] - loads[idlest] <= self._slack:
                chosen = home
            self._homes[prefix] = chosen
            self._homes.move_to_end(prefix)
            if len(self._homes) > self._remembered:
                self._homes.popitem(last=False)
        return chosen

    def forget(self, place: Hashable) -> None:
        """Drop what was sent to a place that has lost it."""
        for prefix in [prefix for prefix, home in self._homes.items() if home == place]:
            del self._homes[prefix]


class ServerPool:
    """Servers in service and out of it; one that holds the prompt, or the least busy, is asked."""

    def __init__(self, urls: Sequence[str], what: str = "rollout server") -> None:
        self.servers, self._what = [Server(url) for url in urls], what
        self.times_out = 0
        self._router = PrefixRouter()

    @property
    def in_service(self) -> list[Server]:
        """The servers that may be asked."""
        return [s for s in self.servers if s.out_because is None and not s.updating.locked()]

    @property
    def is_updating(self) -> bool:
        """Whether a server is getting weights, after which it may be asked."""
        return any(server.updating.locked() for server in self.servers)

    def pick(
        self,
        avoid: Server | None = None,
        prefix: Hashable | None = None,
        only: Server | None = None,
    ) -> Server | None:
        """The server in service to ask, `avoid` only if there is no other; None if none is.

        prefix: what the request shares with others, which then go to the same server unless that
            is much busier than the least busy one
        only: no other server may be asked
        """
        candidates = [s for s in self.in_service if only is None or s is only]
        others = [server for server in candidates if server is not avoid] or candidates
        return self._router.choose(prefix, {server: server.in_flight for server in others})

    async def ask(
        self,
        call: Callable[[Server], Awaitable[T | None]],
        choose: Callable[[Server | None], Awaitable[Server]],
        *,
        retries: int,
        backoff: float,
    ) -> T:
        """The result of `call`, retried after a failure; raises the last `FailedCall`.

        call: returns None, or raises `WeightsChanged`, if it is to be made again at no cost
        choose: the server to ask next; is given the one that failed last
        retries: attempts after a failed one, `backoff` seconds later at first, then twice as long
            each time; spread, so that calls do not come back together
        """
        failures = 0
        failed: Server | None = None
        while True:
            server = await choose(failed)
            try:
                with self.call(server):
                    found = await call(server)
                if found is not None:
                    return found
            except WeightsChanged:
                await asyncio.sleep(UPDATE_POLL_SECONDS)
            except CallRefused as refusal:
                raise CallRefused(f"{server.url}: {refusal}") from None
            except FailedCall:
                failures, failed = failures + 1, server
                if failures > retries:
                    raise
                pause = min(backoff * 2 ** (failures - 1), _LONGEST_BACKOFF)
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))

    @contextmanager
    def call(self, server: Server) -> Iterator[None]:
        """Count a call and how it ended; a `FailedCall` where it may be made again."""
        known_before = server.troubles
        server.in_flight += 1
        try:
            yield
        except (ServerTrouble, MalformedAnswer) as trouble:
            if isinstance(trouble, ServerGone):
                self.take_out(server, str(trouble))
            else:
                self._trouble(server, known_before, str(trouble))
            raise FailedCall(f"{server.url}: {trouble}") from None
        else:
            server.troubles = 0
        finally:
            server.in_flight -= 1

    def _trouble(self, server: Server, known_before: int, reason: str) -> None:
        """Count a failed call or bad answer; enough of them in a row take the server out."""
        server.failed_calls += 1
        # The 1st, 2nd, 4th, 8th, ...: a broken server must not flood the log.
        if server.failed_calls & (server.failed_calls - 1) == 0:
            _LOG.warning(
                "%s %s: failed call number %d: %s",
                *(self._what, server.url, server.failed_calls, reason),
            )
        if known_before == server.troubles:
            server.troubles += 1
        if server.troubles >= _TROUBLES_UNTIL_OUT:
            self.take_out(server, reason)

    def take_out(self, server: Server, reason: str) -> None:
        """Send it no requests until a probe succeeds."""
        if server.out_because is None:
            self.times_out += 1
            server.probe_delay = _FIRST_PROBE_SECONDS
            now = time.strftime("%X")
            _LOG.warning("%s %s is out of service at %s: %s", self._what, server.url, now, reason)
            self._router.forget(server)
        server.out_because = reason
        self.postpone_probe(server)

    def postpone_probe(self, server: Server) -> None:
        """Probe it later; the reason why it is out of service stays."""
        server.probe_at = time.monotonic() + server.probe_delay
        server.probe_delay = min(2 * server.probe_delay, _LAST_PROBE_SECONDS)

    def put_in(self, server: Server, label: str) -> None:
        """Put a server in service that has the weights `label`."""
        server.label = label
        if server.out_because is not None and server.probe_at:
            now = time.strftime("%X")
            _LOG.warning("%s %s is back in service at %s", self._what, server.url, now)
        server.out_because = None
        server.troubles = 0
        server.probe_delay = _FIRST_PROBE_SECONDS
