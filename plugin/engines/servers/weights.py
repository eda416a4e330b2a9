"""Weights over process groups into servers, which are told by HTTP what they will receive."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from plugin.engines.servers.dialects import BroadcastDialect, ServerCall
from plugin.engines.servers.pool import Server
from plugin.weights.group import GroupStore, WeightGroup

Call = Callable[[Server, ServerCall], Awaitable[None]]


class WeightLabels:
    """Names of versions among all jobs that ever sent weights to the servers."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(6)

    def of(self, version: int) -> str:
        """The label of a version."""
        return f"{self._token}-v{version}"

    @staticmethod
    def version_of(label: str) -> int:
        """The weight version that a label names."""
        return int(label.rpartition("-v")[2])


class ServerStream:
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
        dialect: BroadcastDialect,
        call: Call,
        take: Callable[[Iterable[tuple[str, Tensor]]], None],
    ) -> None:
        """Have `servers` receive all of `version` and name it `label`.

        first: number of the first server's first worker among the receivers
        call: makes a call to a server, or raises
        take: is told what the servers receive
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
        named = (self._name(server, label, dialect, call) for server in servers)
        await self._unless_aborted(named)

    async def _name(
        self, server: Server, label: str, dialect: BroadcastDialect, call: Call
    ) -> None:
        for one in dialect.name_weights(label):
            await call(server, one)

    async def _join(
        self, servers: Sequence[Server], first: int, dialect: BroadcastDialect, call: Call
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
