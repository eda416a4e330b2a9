"""Weights into servers: every version, through a shared directory or by broadcast.

A server that does not confirm a version is out of service. It is looked for again, and put back
once it has the newest version. With `interrupts` a server's running responses are cut short before
its weights change, after it has confirmed which weights they come from.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from plugin.engines.servers.calls import (
    CallRefused,
    MalformedAnswer,
    ServerCall,
    ServerSession,
    ServerTrouble,
)
from plugin.engines.servers.dialects import Dialect, SglangDialect
from plugin.engines.servers.pool import UPDATE_POLL_SECONDS, Server, ServerPool
from plugin.engines.transformers.weight_loader import WeightLoader
from plugin.errors import ActorLost, TransferError, WeightError
from plugin.weights.announced import Announcements
from plugin.weights.directory import WeightDirectory
from plugin.weights.group import GroupStore, Membership, WeightGroup
from plugin.weights.tensor_layout import TensorSpec

_PROBE_TIMEOUT = 10.0
_REVIVE_SECONDS = 0.5


def version_of(label: str) -> int:
    """The weight version that a label names."""
    return int(label.rpartition("-v")[2])


class ServerMember:
    """Represents the servers' workers in a group; no weights pass through this process."""

    def __init__(self, group: WeightGroup) -> None:
        self.group, self.store, self.joined = group, GroupStore(group), False

    async def unless_aborted(self, calls: Iterable[Awaitable[None]]) -> None:
        """Wait for all calls, or for the `TransferError` of a transfer that was aborted."""
        ended = threading.Event()
        watch = asyncio.ensure_future(asyncio.to_thread(self.store.waits.result_of, ended.wait))
        work: Any = asyncio.gather(*calls)
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()
            await work
        finally:
            ended.set()
            work.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)

    def close(self, *, abort: bool = False) -> None:
        """Leave the group; the servers stay in theirs until they end or are told of another."""
        self.store.waits.end("this member has left")


def _buckets(
    announcements: Announcements, senders: int, version: int
) -> Iterator[tuple[int, list[TensorSpec]]]:
    """Sender and content of every announced bucket of a version, one sender after the other."""
    for sender in range(senders):
        for specs, _ in announcements.read(version, sender):
            yield sender, specs


class ServerUpdates:
    """Gives the servers of a pool new weights.

    ledger: knows which tensors make a version, and which version is complete
    directory: one that the servers see under the same path; None = weights come by broadcast
    session: opens connections
    timeout: seconds for loading weights
    patience: seconds within which a server has to answer before the first version; None = ever
    label: the newest version's name among all jobs that ever sent weights to the servers
    """

    def __init__(
        self,
        dialect: Dialect,
        pool: ServerPool,
        ledger: WeightLoader,
        directory: WeightDirectory | None,
        session: Callable[[], ServerSession],
        *,
        timeout: float,
        patience: float | None = None,
    ) -> None:
        self._dialect, self._pool, self._ledger = dialect, pool, ledger
        self._directory, self._session = directory, session
        self._timeout, self._patience = timeout, patience
        self._interrupts = dialect.shape.interrupts
        self._token, self.label = secrets.token_hex(6), ""
        self._membership = Membership()

    # -- through a directory

    def load(self, version: int, bucket: bytes | np.ndarray, *, last: bool) -> None:
        """Take a bucket of version `version`; the last one has every server load it from disk.

        A server that does not confirm the version is out of service until it does.
        """
        weights = self._directory
        assert weights is not None, "without a directory weights come by broadcast"
        if not self._ledger.is_partial:
            weights.begin()
        self._ledger.load(version, bucket, last=last)
        weights.add(bucket)
        if not last:
            return
        self.label = f"{self._token}-v{version}"
        weights.finish(self.label)
        asyncio.run(self._distribute())
        weights.remove_older(self.label)

    async def _distribute(self) -> None:
        async with self._session() as session:
            await self._wait_for_one(session)
            updates = [self._update(session, server) for server in self._pool.servers]
            refusals = [refusal for refusal in await asyncio.gather(*updates) if refusal]
        if len(refusals) == len(self._pool.servers):
            raise WeightError(
                f"no server took weight version {self._ledger.version}: {'; '.join(refusals)}; "
                "vLLM needs VLLM_SERVER_DEV_MODE=1 in its environment, and --rollout-weights-dir "
                "must be the same directory for job and servers"
            )

    async def _update(self, session: ServerSession, server: Server) -> str | None:
        """Give `server` the newest weights; the reason if it answered and refused."""
        async with self._changing(session, server):
            label = self.label
            if self._directory is None:
                self._pool.take_out(server, "it lost its weights; it gets the next ones")
                return None
            path = self._directory.path_of(label)
            try:
                for call in self._dialect.weight_update(path, label, abort=self._interrupts):
                    await session.call(server.url, call, self._timeout)
            except (ServerTrouble, CallRefused, MalformedAnswer) as trouble:
                self._pool.take_out(server, f"it did not load new weights: {trouble}")
                return None if isinstance(trouble, ServerTrouble) else f"{server.url}: {trouble}"
            self._pool.put_in(server, label)
            return None

    # -- by broadcast

    @property
    def _broadcast_dialect(self) -> SglangDialect:
        assert isinstance(self._dialect, SglangDialect), "only SGLang servers join process groups"
        return self._dialect

    def count_workers(self) -> int:
        """The workers of all servers that answer."""
        return asyncio.run(self._count_workers())

    async def _count_workers(self) -> int:
        dialect = self._broadcast_dialect
        async with self._session() as session:
            await self._wait_for_one(session)
            for server in self._pool.servers:
                try:
                    answer = await session.call(server.url, dialect.server_size(), _PROBE_TIMEOUT)
                    server.workers = dialect.workers_of(answer)
                except (ServerTrouble, CallRefused, MalformedAnswer) as trouble:
                    server.workers = 0
                    self._pool.take_out(server, str(trouble))
        count = sum(server.workers for server in self._pool.servers)
        if not count:
            causes = "; ".join(f"{s.url}: {s.out_because}" for s in self._pool.servers)
            raise ActorLost(f"no rollout server can receive weights: {causes}")
        return count

    def receive(self, version: int, group: WeightGroup, first: int) -> None:
        """Have the servers take all of `version`; see `BroadcastEngine`.

        A server that does not confirm the version is out of service.
        """
        self.label = f"{self._token}-v{version}"
        servers = [server for server in self._pool.servers if server.workers]
        with self._membership.of(group, lambda: ServerMember(group)) as member:
            self._ledger.begin(version)
            asyncio.run(self._receive(member, version, first, servers))
            self._ledger.end()

    async def _receive(
        self, member: ServerMember, version: int, first: int, servers: Sequence[Server]
    ) -> None:
        """Tell the servers to join the group, if they have not, and what they receive.

        first: number of the first server's first worker among the receivers
        """
        dialect, group, store = self._broadcast_dialect, member.group, member.store
        speaks_for = first
        workers = sum(server.workers for server in servers)
        pause, resume = dialect.pause_calls() if self._interrupts else ([], [])
        async with self._session() as session, contextlib.AsyncExitStack() as changing:

            async def call(server: Server, *calls: ServerCall) -> None:
                try:
                    for one in calls:
                        await session.call(server.url, one, self._timeout)
                except (ServerTrouble, CallRefused, MalformedAnswer) as trouble:
                    self._pool.take_out(server, f"it did not receive new weights: {trouble}")
                    raise TransferError(f"{server.url}: {trouble}") from trouble

            for server in servers:
                await changing.enter_async_context(self._changing(session, server))
                await call(server, *pause)
            if not member.joined:
                await asyncio.to_thread(store.barrier, "joined", workers)
                joins = []  # all at once: a group forms when everybody has come
                for server in servers:
                    for sender in range(group.senders):
                        joins.append(call(server, dialect.join_group(group, sender, 1 + first)))
                    first += server.workers
                await member.unless_aborted(joins)
                member.joined = True
            store.engine_is_ready(version, speaks_for)
            buckets = _buckets(Announcements(store, group.name), group.senders, version)
            while (bucket := await asyncio.to_thread(next, buckets, None)) is not None:
                sender, specs = bucket
                self._ledger.take(
                    (s.name, torch.empty(s.shape, dtype=s.dtype, device="meta")) for s in specs
                )
                received = dialect.receive(group.lane_name(sender), specs, f"loading {self.label}")
                await member.unless_aborted(call(server, received) for server in servers)
            last = (*dialect.name_weights(self.label), *resume)
            await member.unless_aborted(call(server, *last) for server in servers)
            for server in servers:
                self._pool.put_in(server, self.label)

    # -- both

    async def _wait_for_one(self, session: ServerSession) -> None:
        """Before the first version wait until a server answers; a `WeightError` if none does."""

        async def silence_of(server: Server) -> str | None:
            try:
                label = self._dialect.weight_label(self.label)
                await session.call(server.url, label, _PROBE_TIMEOUT)
            except ServerTrouble as trouble:
                return f"{server.url}: {trouble}"
            except (CallRefused, MalformedAnswer):
                pass  # it has other weights
            return None

        patience, self._patience = self._patience, None
        deadline = time.monotonic() + (patience or 0.0)
        while patience is not None:
            silences = await asyncio.gather(*map(silence_of, self._pool.servers))
            if not all(silences):
                return
            if time.monotonic() > deadline:
                raise WeightError(
                    f"no rollout server has answered within {patience:g} s (--start-timeout): "
                    f"{'; '.join(map(str, silences))}; start the servers, or correct --rollout-url"
                )
            await asyncio.sleep(_REVIVE_SECONDS)

    @contextlib.asynccontextmanager
    async def _changing(self, session: ServerSession, server: Server) -> AsyncIterator[None]:
        """Lock a server against requests, and against updates by other threads.

        Where weights interrupt responses, the server first confirms which ones these come from; if
        it does not, they are thrown away.
        """
        while not server.updating.acquire(blocking=False):
            await asyncio.sleep(UPDATE_POLL_SECONDS)
        try:
            has = server.label
            if self._interrupts and has is not None and has != self.label:
                with contextlib.suppress(ServerTrouble, CallRefused, MalformedAnswer):
                    await session.call(server.url, self._dialect.weight_label(has), _PROBE_TIMEOUT)
                    server.interrupted_at = has
            # Responses that are answered from here on may come from either weights.
            server.label = None
            yield
        finally:
            server.updating.release()

    async def revive_due(self, session: ServerSession) -> None:
        """Put back servers that answer, after loading the weights again if they have lost them."""

        async def revive(server: Server) -> None:
            label = self.label
            try:
                await session.call(server.url, self._dialect.weight_label(label), _PROBE_TIMEOUT)
            except MalformedAnswer:
                server.tested, server.reloaded = False, True
                await self._update(session, server)
            except (ServerTrouble, CallRefused):
                self._pool.postpone_probe(server)
            else:
                self._pool.put_in(server, label)

        now = time.monotonic()
        out = [s for s in self._pool.servers if s.out_because and not s.updating.locked()]
        await asyncio.gather(*(revive(server) for server in out if server.probe_at <= now))

    async def keep_reviving(self, session: ServerSession, end: asyncio.Event) -> None:
        """Revive servers that are out of service until `end`; waits for a reload that has begun."""
        while not end.is_set():
            await self.revive_due(session)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(end.wait(), _REVIVE_SECONDS)
