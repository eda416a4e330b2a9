"""Whether a server that is asked for responses generates: its metrics change as tokens come.

Servers answer whole responses, and one of 32,000 tokens may take an hour. Both kinds of servers
tell Prometheus how far they are, at `/metrics`; those that do not are given the time that the
longest response may take.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from plugin.engines.servers.calls import CallRefused, MalformedAnswer, ServerSession, ServerTrouble
from plugin.engines.servers.pool import Server, ServerPool

T = TypeVar("T")

WATCH_SECONDS = 5.0
_ASK_SECONDS = 10.0
#: How many times as long as a response a request may take at a server that generates: it may wait
#: behind others there, and its own answer may be lost.
_LONGEST = 4


class ServerSilent(ServerTrouble):
    """A server that tells its progress has made none for too long."""


class ServerWatch:
    """Looks at the servers of a pool that have requests.

    metrics: names of those that change while a server generates
    looked: called after every look
    """

    def __init__(
        self,
        pool: ServerPool,
        metrics: Collection[str],
        looked: Callable[[], None],
        *,
        interval: float = WATCH_SECONDS,
    ) -> None:
        self._pool, self._looked, self._interval = pool, looked, interval
        names = "|".join(map(re.escape, metrics))
        self._line = re.compile(rf"^(?:{names})(?:{{.*}})? .*$", re.MULTILINE)

    async def keep_looking(self, session: ServerSession) -> None:
        """Look at busy servers now and then, until it is cancelled."""
        while True:
            busy = [
                s for s in self._pool.servers if s.in_flight and s.reports_progress is not False
            ]
            await asyncio.gather(*(self._look_at(session, server) for server in busy))
            self._looked()
            await asyncio.sleep(self._interval)

    async def _look_at(self, session: ServerSession, server: Server) -> None:
        try:
            text = await session.text(server.url, "/metrics", _ASK_SECONDS)
        except (ServerTrouble, MalformedAnswer):
            return  # one that has told its progress makes none now
        except CallRefused:
            server.reports_progress = False
            return
        found = tuple(self._line.findall(text))
        server.reports_progress = bool(found)
        if found != server.progress:
            server.progress, server.progressed_at = found, time.monotonic()


async def while_it_generates(
    server: Server, answer: Awaitable[T], *, timeout: float, silence: float, is_final: bool
) -> T:
    """The answer of a server; a `ServerTrouble` once it is too late.

    timeout: seconds for an answer of a server that does not tell its progress
    silence: seconds without progress of one that does
    is_final: whether `timeout` is the limit of that one, too
    """
    asking, began = asyncio.ensure_future(answer), time.monotonic()
    try:
        while True:
            now, tells = time.monotonic(), bool(server.reports_progress)
            most = timeout if is_final or not tells else _LONGEST * timeout
            last = max(began, server.progressed_at)
            left = min(began + most, last + silence if tells else began + most) - now
            done, _ = await asyncio.wait({asking}, timeout=max(0.0, min(left, WATCH_SECONDS)))
            if done:
                return asking.result()
            if left <= 0 and now - began < most:
                server.is_silent = True
                raise ServerSilent(f"it generated nothing for {silence:g} s (--rollout-timeout)")
            if left <= 0:
                raise ServerTrouble(f"no complete answer within {most:g} s")
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
