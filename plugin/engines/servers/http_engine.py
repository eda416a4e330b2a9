"""The `http` engine: a client of vLLM or SGLang servers that run elsewhere.

Every response is a call of its own, so servers batch as they like (`responses`). Weights get
to the servers by `updates`. No task or connection outlives the responses under way.

With --partial-rollouts one thread may call `load_weights` while another generates. Servers then cut
their running responses short, load the weights, and are asked for the rest of each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from plugin.config import JobConfig
from plugin.engines.choice import api_key
from plugin.engines.expert_routes import RouteShape
from plugin.engines.protocol import (
    Answer,
    Finished,
    GenerationRequest,
    SamplingParameters,
)
from plugin.engines.response_stream import GeneratesBySteps
from plugin.engines.servers.calls import ServerSession
from plugin.engines.servers.dialects import DIALECTS, Dialect, ResponseShape
from plugin.engines.servers.pool import Server, ServerPool
from plugin.engines.servers.progress import WATCH_SECONDS, ServerWatch
from plugin.engines.servers.responses import ServerResponses
from plugin.engines.servers.updates import ServerUpdates
from plugin.engines.transformers.weight_loader import weight_ledger
from plugin.errors import ConfigError
from plugin.weights.buckets import NO_WEIGHTS
from plugin.weights.directory import WeightDirectory
from plugin.weights.group import WeightGroup

#: How long a step waits for a response, and how often it looks.
_STEP_SECONDS, _LOOK_SECONDS = 0.05, 0.005
#: Before the first retry of a response.
_BACKOFF_SECONDS = 0.5


class HttpEngine(GeneratesBySteps):
    """A `RolloutEngine` that asks servers.

    hf_config: of the model that the servers run
    urls, server: the addresses and what runs there, a key of `DIALECTS`; None = those of the flags
    key: the servers' API key; None = that of --rollout-api-key-env, if any
    pool: the servers and their state
    updates: gives them weights
    """

    def __init__(
        self,
        config: JobConfig,
        hf_config: Mapping[str, Any],
        name: str,
        *,
        urls: Sequence[str] | None = None,
        server: str | None = None,
        key: str | None = None,
    ) -> None:
        urls = config.rollout_urls if urls is None else urls
        if not urls:
            raise ConfigError("--rollout-engine http needs at least one URL; give --rollout-url")
        super().__init__(name, weight_ledger(hf_config))
        self._max_batch, self._interrupts = config.rollout_max_batch, config.interrupts_responses
        positions = int(hf_config.get("max_position_embeddings") or 1 << 20)
        shape = ResponseShape(
            vocab_size=int(hf_config["vocab_size"]),
            max_model_len=min(config.max_context_length or positions, positions),
            routes=RouteShape.of(hf_config),
            interrupts=self._interrupts,
        )
        dialect: Dialect = DIALECTS[server or config.rollout_server](shape)
        self.pool = ServerPool(urls)
        self._session = partial(ServerSession, config.max_answer_bytes, key or api_key(config))
        directory = None
        if config.weight_transport == "directory":
            directory = WeightDirectory(str(config.rollout_weights_dir), hf_config)
        self.updates = ServerUpdates(
            dialect,
            self.pool,
            self._weights,
            directory,
            self._session,
            timeout=config.transfer_patience,
            patience=config.start_timeout,
        )
        self._responses = ServerResponses(
            dialect,
            self.pool,
            timeout=config.request_patience,
            silence=config.server_silence,
            is_final=config.rollout_request_timeout is not None,
            retries=config.rollout_request_retries,
            backoff=_BACKOFF_SECONDS,
        )
        self._events = asyncio.new_event_loop()
        self._looks = 0
        self._watch = ServerWatch(
            self.pool,
            dialect.progress_metrics,
            self._count_look,
            interval=min(WATCH_SECONDS, config.engine_patience / 4),
        )
        self._connection: tuple[ServerSession, asyncio.Event, asyncio.Task[None]] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._new: list[tuple[int, GenerationRequest, SamplingParameters]] = []
        self._groups: set[asyncio.Task[None]] = set()
        self._finished: list[Finished] = []
        self._running = 0

    # -- weights

    def load_weights(self, version: int, bucket: bytes | np.ndarray, *, last: bool) -> None:
        """Take a bucket of version `version`; the last one has every server load it from disk."""
        self.updates.load(version, bucket, last=last)

    def weight_receivers(self) -> int:
        """The workers of all servers that answer."""
        return self.updates.count_workers()

    def receive_weights(self, version: int, group: WeightGroup, first: int) -> None:
        """Have the servers take all of `version`; see `BroadcastEngine`."""
        self.updates.receive(version, group, first)

    # -- generation

    @property
    def progress(self) -> int:  # type: ignore[override]
        """Grows as long as this client is alive; see `EngineTraits.reports_tokens`.

        What it waits for has deadlines of its own: every request, and every update of weights.
        """
        if self.pool.is_updating:
            self._count_look()
        return self._looks

    def _count_look(self) -> None:
        self._looks += 1

    @property
    def running(self) -> int:
        """Responses that were added and have not finished."""
        return self._running

    @property
    def room(self) -> int:
        """How many more may be asked for."""
        return self._max_batch - self._running

    def add(self, ticket: int, request: GenerationRequest, parameters: SamplingParameters) -> None:
        """Ask for the responses to a request at the next step; see `SteppingEngine`."""
        self._new.append((ticket, request, parameters))
        self._running += len(request.seeds)

    def step(self) -> list[Finished]:
        """Wait briefly for responses; returns those that are complete."""
        if not self._interrupts or self._weights.version == NO_WEIGHTS:
            self._weights.require_complete(self._name)
        try:
            self._events.run_until_complete(self._advance())
        except BaseException:
            self.abort()
            raise
        finished = self._finished[:]
        self._finished.clear()
        self._running -= len(finished)
        if not self._running:
            self._events.run_until_complete(self._disconnect())
        return self._counted(finished)

    def probe(
        self, request: GenerationRequest, parameters: SamplingParameters
    ) -> list[tuple[str, list[Answer]]]:
        """Every server in service with its responses, while no other is under way."""

        async def ask(server: Server) -> list[Answer]:
            found: list[Finished] = []
            async with self._session() as session:
                await self._responses.ask_for_group(
                    session, 0, request, parameters, found.append, only=server
                )
            return [finished.answer for finished in sorted(found, key=lambda one: one.place)]

        async def ask_all() -> list[tuple[str, list[Answer]]]:
            servers = self.pool.in_service
            answers = await asyncio.gather(*map(ask, servers))
            for server in servers:
                server.reloaded = False
            return [(server.url, got) for server, got in zip(servers, answers, strict=True)]

        return self._events.run_until_complete(ask_all())

    def awaits_probe(self) -> bool:
        """Whether a server that came back got weights again and has not been probed since."""
        return any(server.reloaded for server in self.pool.in_service)

    def abort(self) -> None:
        """Forget the responses under way and close their connections."""
        self._new.clear()
        self._events.run_until_complete(self._disconnect())
        self._finished.clear()
        self._running = 0

    async def _advance(self) -> None:
        """Ask for what is new, and wait until responses are complete, or for a moment."""
        if self._connection is None:
            session = self._session()
            end = asyncio.Event()
            await self.updates.revive_due(session)
            reviver = asyncio.create_task(self.updates.keep_reviving(session, end))
            self._watching = asyncio.create_task(self._watch.keep_looking(session))
            self._connection = (session, end, reviver)
        session = self._connection[0]
        for ticket, request, parameters in self._new:
            group = self._responses.ask_for_group(
                session, ticket, request, parameters, self._finished.append
            )
            self._groups.add(asyncio.create_task(group))
        self._new.clear()
        deadline = self._events.time() + _STEP_SECONDS
        while not self._finished and self._events.time() < deadline:
            done, self._groups = await asyncio.wait(
                self._groups, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            for group_task in done:
                group_task.result()

    async def _disconnect(self) -> None:
        ending = [*self._groups, *([self._watching] if self._watching else [])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        self._groups.clear()
        if self._connection is not None:
            session, end, reviver = self._connection
            self._connection = None
            end.set()
            await reviver
            await session.close()
