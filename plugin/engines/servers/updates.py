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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plugin.engines.servers.answers import MalformedAnswer
from plugin.engines.servers.calls import CallRefused, ServerCall, ServerSession, ServerTrouble
from plugin.engines.servers.dialects import Dialect, SglangDialect
from plugin.engines.servers.pool import UPDATE_POLL_SECONDS, Server, ServerPool
from plugin.engines.transformers.weight_loader import WeightLoader
from plugin.errors import ActorLost, TransferError, WeightError
from plugin.weights.directory import WeightDirectory
from plugin.weights.group import GroupStore, Membership, WeightGroup

_PROBE_TIMEOUT = 10.0
_REVIVE_SECONDS = 0.5


Call = Callable[[Server, ServerCall], Awaitable[None]]


def version_of(label: str) -> int:
    """The weight version that a label names."""
    return int(label.rpartition("-v")[2])


@contextlib.asynccontextmanager
async def _locked(server: Server) -> AsyncIterator[None]:
    """Wait until no other thread updates or revives the server."""
    while not server.updating.acquire(blocking=False):
        await asyncio.sleep(UPDATE_POLL_SECONDS)
    try:
        yield
    finally:
        server.updating.release()


class ServerMember:
    """Stands for the workers of servers in a group, and tells the servers what they receive.

    No weights come through this process.
    """

    def __init__(self, group: WeightGroup) -> None:
        self._store, self._joined = GroupStore(group), False

    @property
    def group(self) -> WeightGroup:
        """The group that the servers are members of."""
        return self._store.group

    async def receive(
        self,
        version: int,
        servers: Sequence[Server],
        first: int,
        label: str,
        dialect: SglangDialect,
        call: Call,
        take: Callable[[Iterable[tuple[str, Tensor]]], None],
    ) -> None:
        """Have `servers` receive all of `version` and name it `label`.

        first: number of the first server's first worker among the receivers
        call: makes a call to a server, or raises
        take: gets the names and shapes of what the servers receive
        """
        workers = sum(server.workers for server in servers)
        if not self._joined:
            await asyncio.to_thread(self._store.barrier, "joined", workers)
            await self._join(servers, first, dialect, call)
        await asyncio.to_thread(self._store.barrier, f"version {version}", workers)
        buckets = self._store.buckets(version)
        while (bucket := await asyncio.to_thread(next, buckets, None)) is not None:
            sender, specs = bucket
            take((s.name, torch.empty(s.shape, dtype=s.dtype, device="meta")) for s in specs)
            received = dialect.receive(self.group.sender_name(sender), specs, f"loading {label}")
            await self._unless_aborted(call(server, received) for server in servers)

        async def name(server: Server) -> None:
            for one in dialect.name_weights(label):
                await call(server, one)

        await self._unless_aborted(map(name, servers))

    async def _join(
        self, servers: Sequence[Server], first: int, dialect: SglangDialect, call: Call
    ) -> None:
        """Have every server join the groups of all senders, which form when all have come."""
        joins = []
        for server in servers:
            for sender in range(self.group.senders):
                joins.append(call(server, dialect.join_group(self.group, sender, 1 + first)))
            first += server.workers
        await self._unless_aborted(joins)
        self._joined = True

    async def _unless_aborted(self, calls: Iterable[Awaitable[None]]) -> None:
        """Wait for all calls, or for the `TransferError` of a transfer that was aborted."""
        ended = threading.Event()
        watch = asyncio.ensure_future(asyncio.to_thread(self._store.wait_until, ended.is_set))
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


class ServerUpdates:
    """Gives the servers of a pool new weights.

    ledger: knows which tensors make a version, and which version is complete
    directory: one that the servers see under the same path; None = weights come by broadcast
    session: opens connections
    timeout: seconds for loading weights
    interrupts: whether responses are cut short, and later continued, when weights arrive
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
        interrupts: bool,
        patience: float | None = None,
    ) -> None:
        self._dialect, self._pool, self._ledger = dialect, pool, ledger
        self._patience = patience
        self._directory, self._session = directory, session
        self._timeout, self._interrupts = timeout, interrupts
        self._token, self.label = secrets.token_hex(6), ""
        self._membership = Membership()

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

    async def _wait_for_one(self, session: ServerSession) -> None:
        """Before the first version wait until a server answers; a `WeightError` if none does."""
        patience, self._patience = self._patience, None
        deadline = time.monotonic() + (patience or 0.0)
        while patience is not None:
            asked = (self._silence_of(session, server) for server in self._pool.servers)
            silences = await asyncio.gather(*asked)
            if not all(silences):
                return
            if time.monotonic() > deadline:
                raise WeightError(
                    f"no rollout server has answered within {patience:g} s (--start-timeout): "
                    f"{'; '.join(map(str, silences))}; start the servers, or correct --rollout-url"
                )
            await asyncio.sleep(_REVIVE_SECONDS)

    async def _silence_of(self, session: ServerSession, server: Server) -> str | None:
        """Why a server does not answer; None if it does."""
        try:
            await session.call(server.url, self._dialect.weight_label(self.label), _PROBE_TIMEOUT)
        except ServerTrouble as trouble:
            return f"{server.url}: {trouble}"
        except (CallRefused, MalformedAnswer):
            pass  # it has other weights
        return None

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
        with self._membership.of(group, lambda: ServerMember(group)) as stream:
            self._ledger.begin(version)
            asyncio.run(self._receive(stream, version, first, servers))
            self._ledger.end()

    async def _receive(
        self, stream: ServerMember, version: int, first: int, servers: Sequence[Server]
    ) -> None:
        async with self._session() as session, contextlib.AsyncExitStack() as stack:

            async def call(server: Server, call: ServerCall) -> None:
                try:
                    await session.call(server.url, call, self._timeout)
                except (ServerTrouble, CallRefused, MalformedAnswer) as trouble:
                    self._pool.take_out(server, f"it did not receive new weights: {trouble}")
                    raise TransferError(f"{server.url}: {trouble}") from trouble

            for server in servers:
                await stack.enter_async_context(self._updating(session, server, call))
            await stream.receive(
                version,
                servers,
                *(first, self.label, self._broadcast_dialect, call, self._ledger.take),
            )
            for server in servers:
                self._pool.put_in(server, self.label)

    @contextlib.asynccontextmanager
    async def _updating(
        self, session: ServerSession, server: Server, call: Call
    ) -> AsyncIterator[None]:
        """Keep requests from a server whose weights change; with `interrupts` cut them short."""
        async with _locked(server):
            if self._interrupts and server.label is not None:
                await self._note_interruption(session, server, server.label)
            server.label = None
            interrupts = self._interrupts
            pause, resume = self._broadcast_dialect.pause_calls() if interrupts else ([], [])
            for one in pause:
                await call(server, one)
            yield
            for one in resume:
                await call(server, one)

    async def _update(self, session: ServerSession, server: Server) -> str | None:
        """Give `server` the newest weights; the reason if it answered and refused."""
        async with _locked(server):
            return await self._update_alone(session, server)

    async def _update_alone(self, session: ServerSession, server: Server) -> str | None:
        label = self.label
        if self._directory is None:
            self._pool.take_out(server, "it lost its weights; it gets the next ones")
            return None
        calls = self._dialect.weight_update(
            self._directory.path_of(label), label, abort=self._interrupts
        )
        if self._interrupts and server.label is not None and server.label != label:
            await self._note_interruption(session, server, server.label)
        # Responses that are answered from here on may come from either weights.
        server.label = None
        try:
            for call in calls:
                await session.call(server.url, call, self._timeout)
        except ServerTrouble as trouble:
            self._pool.take_out(server, f"it did not load new weights: {trouble}")
        except (CallRefused, MalformedAnswer) as refusal:
            self._pool.take_out(server, f"it did not load new weights: {refusal}")
            return f"{server.url}: {refusal}"
        else:
            self._pool.put_in(server, label)
        return None

    async def _note_interruption(self, session: ServerSession, server: Server, has: str) -> None:
        """Have the server confirm that its interrupted responses come from the weights `has`.

        Those of one that does not are thrown away.
        """
        with contextlib.suppress(ServerTrouble, CallRefused, MalformedAnswer):
            await session.call(server.url, self._dialect.weight_label(has), _PROBE_TIMEOUT)
            server.interrupted_at = has

    async def _revive(self, session: ServerSession, server: Server) -> None:
        """Put a server back that answers, after loading the weights again if it has lost them."""
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

    async def revive_due(self, session: ServerSession) -> None:
        now = time.monotonic()
        out = [s for s in self._pool.servers if s.out_because and not s.updating.locked()]
        due = [server for server in out if server.probe_at <= now]
        await asyncio.gather(*(self._revive(session, server) for server in due))

    async def keep_reviving(self, session: ServerSession, end: asyncio.Event) -> None:
        """Revive servers that are out of service until `end`; waits for a reload that has begun."""
        while not end.is_set():
            await self.revive_due(session)
            try:
                await asyncio.wait_for(end.wait(), _REVIVE_SECONDS)
            except TimeoutError:
                continue
