"""The `http` engine: a client of vLLM or SGLang servers that run elsewhere.

Every response is a call of its own, so servers batch as they like. A response is believed if its
tokens and log-probs are complete and the server confirms that it still has the weights it was
given; everything else is asked for again and finally becomes a `GenerationFailure`. No task or
connection outlives the responses under way.

With `interrupts` one thread may call `load_weights` while another generates. Servers then cut their
running responses short, load the weights, and are asked for the rest of each: the prompt and what
was sampled so far, read anew with the new weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from plugin.config import JobConfig
from plugin.errors import ActorLost, ConfigError, TransferError, WeightError
from plugin.ragged import Ragged
from plugin.rollout.engines.choice import api_key
from plugin.rollout.engines.expert_routes import RouteShape, continued_routes
from plugin.rollout.engines.protocol import (
    Answer,
    EngineHealth,
    Finished,
    Generation,
    GenerationFailure,
    GenerationRequest,
    SamplingParameters,
)
from plugin.rollout.engines.response_stream import generate_by_steps
from plugin.rollout.engines.server_answers import Ask, MalformedAnswer, WrongLogProbs
from plugin.rollout.engines.server_calls import (
    CallRefused,
    ServerGone,
    ServerSession,
    ServerTrouble,
)
from plugin.rollout.engines.server_dialects import (
    DIALECTS,
    BroadcastDialect,
    Dialect,
    ResponseShape,
    ServerCall,
)
from plugin.rollout.engines.server_pool import Server, ServerPool
from plugin.rollout.engines.server_weights import ServerStream, WeightLabels
from plugin.rollout.engines.weight_buckets import NO_WEIGHTS, weight_ledger
from plugin.rollout.engines.weight_directory import WeightDirectory
from plugin.rollout.engines.weight_stream import Membership, WeightGroup

_PROBE_TIMEOUT = 10.0
_REVIVE_SECONDS = 0.5
_UPDATE_POLL_SECONDS = 0.02
_LONGEST_BACKOFF = 15.0
#: How long a step waits for a response, and how often it looks.
_STEP_SECONDS, _LOOK_SECONDS = 0.05, 0.005
#: Failing at once would make a driver that samples again spin while the servers restart.
_ALL_OUT_PAUSE = 1.0
_TOKENS_OF_A_PREFIX = 16


def make_engine(config: JobConfig, hf_config: Mapping[str, Any], name: str) -> HttpEngine:
    """The engine with the settings of a job."""
    return HttpEngine(
        config.rollout_urls,
        hf_config,
        weights_dir=config.rollout_weights_dir if config.weight_way == "directory" else None,
        server=config.rollout_server,
        request_timeout=config.rollout_request_timeout,
        update_timeout=config.step_timeout,
        retries=config.rollout_request_retries,
        api_key=api_key(config),
        max_batch=config.rollout_max_batch,
        max_answer_bytes=config.max_answer_bytes,
        max_model_len=config.max_context_length,
        interrupts=config.partial_rollouts,
        name=name,
    )


class HttpEngine:
    """A `RolloutEngine` that asks servers.

    hf_config: of the model that the servers run
    weights_dir: a directory that they see under the same path; None = weights come by broadcast
    request_timeout: seconds for one response to its last byte
    update_timeout: seconds for loading weights
    retries: attempts after a failed one, `backoff` seconds later at first, then twice as long each
        time
    api_key: sent with every call as a bearer token
    max_batch: responses asked for at the same time
    max_answer_bytes: of one answer, decompressed
    interrupts: responses are cut short and continued when weights arrive; see above
    pool: the servers and their state
    """

    def __init__(
        self,
        urls: Sequence[str],
        hf_config: Mapping[str, Any],
        *,
        weights_dir: str | None,
        server: str = "vllm",
        request_timeout: float = 600.0,
        update_timeout: float = 1800.0,
        retries: int = 3,
        backoff: float = 0.5,
        api_key: str | None = None,
        max_batch: int = 256,
        max_answer_bytes: int = 16 << 20,
        max_model_len: int | None = None,
        interrupts: bool = False,
        name: str = "engine",
    ) -> None:
        if not urls:
            raise ConfigError("--rollout-engine http needs at least one URL; give --rollout-url")
        self._dialect: Dialect = DIALECTS[server]()
        self.pool = ServerPool(urls)
        self._ledger = weight_ledger(hf_config)
        self._weights = None if weights_dir is None else WeightDirectory(weights_dir, hf_config)
        self._labels, self._label = WeightLabels(), ""
        positions = int(hf_config.get("max_position_embeddings") or 1 << 20)
        self._shape = ResponseShape(
            vocab_size=int(hf_config["vocab_size"]),
            max_model_len=min(max_model_len or positions, positions),
            num_layers=int(hf_config["num_hidden_layers"]),
            routes=RouteShape.of(hf_config),
        )
        self._request_timeout, self._update_timeout = request_timeout, update_timeout
        self._retries, self._backoff, self._max_batch = retries, backoff, max_batch
        self._interrupts, self._name = interrupts, name
        self._session = partial(ServerSession, max_answer_bytes, api_key)
        self._generated_tokens = 0
        self._events = asyncio.new_event_loop()
        self._connection: tuple[ServerSession, asyncio.Event, asyncio.Task[None]] | None = None
        self._new: list[tuple[int, GenerationRequest, SamplingParameters]] = []
        self._groups: set[asyncio.Task[None]] = set()
        self._finished: list[Finished] = []
        self._running = 0
        self._membership = Membership()

    def health(self) -> EngineHealth:
        """Version of the weights and tokens generated so far; says nothing of the servers."""
        return EngineHealth(self._name, self._ledger.version, self._generated_tokens)

    # -- weights

    def load_weights(self, version: int, bucket: bytes | np.ndarray, *, last: bool) -> None:
        """Take a bucket of version `version`; the last one has every server load it from disk.

        A server that does not confirm the version is out of service until it does.
        """
        weights = self._weights
        assert weights is not None, "without a directory weights come by broadcast"
        if not self._ledger.is_partial:
            weights.begin()
        self._ledger.load(version, bucket, last=last)
        weights.add(bucket)
        if not last:
            return
        self._label = self._labels.of(version)
        weights.finish(self._label)
        asyncio.run(self._distribute())
        weights.remove_older(self._label)

    async def _distribute(self) -> None:
        async with self._session() as session:
            updates = [self._update(session, server) for server in self.pool.servers]
            refusals = [refusal for refusal in await asyncio.gather(*updates) if refusal]
        if len(refusals) == len(self.pool.servers):
            raise WeightError(
                f"no server took weight version {self._ledger.version}: {'; '.join(refusals)}; "
                "vLLM needs VLLM_SERVER_DEV_MODE=1 in its environment, and --rollout-weights-dir "
                "must be the same directory for job and servers"
            )

    @property
    def _broadcast_dialect(self) -> BroadcastDialect:
        return cast(BroadcastDialect, self._dialect)

    def weight_receivers(self) -> int:
        """The workers of all servers that answer."""
        return asyncio.run(self._count_workers())

    async def _count_workers(self) -> int:
        dialect = self._broadcast_dialect
        async with self._session() as session:
            for server in self.pool.servers:
                try:
                    answer = await session.call(server.url, dialect.server_size(), _PROBE_TIMEOUT)
                    server.workers = dialect.workers_of(answer)
                except (ServerTrouble, CallRefused, MalformedAnswer) as trouble:
                    server.workers = 0
                    self.pool.take_out(server, str(trouble))
        count = sum(server.workers for server in self.pool.servers)
        if not count:
            causes = "; ".join(f"{s.url}: {s.out_because}" for s in self.pool.servers)
            raise ActorLost(f"no rollout server can receive weights: {causes}")
        return count

    def receive_weights(self, version: int, group: WeightGroup, first: int) -> None:
        """Have the servers take all of `version`; see `BroadcastEngine`.

        A server that does not confirm the version is out of service.
        """
        self._label = self._labels.of(version)
        servers = [server for server in self.pool.servers if server.workers]
        with self._membership.of(group, lambda: ServerStream(group)) as stream:
            self._ledger.begin(version)
            asyncio.run(self._receive(stream, version, first, servers))
            self._ledger.end()

    async def _receive(
        self, stream: ServerStream, version: int, first: int, servers: Sequence[Server]
    ) -> None:
        async with self._session() as session, contextlib.AsyncExitStack() as stack:
            for server in servers:
                await stack.enter_async_context(self._updating(session, server))

            async def call(server: Server, call: ServerCall) -> None:
                try:
                    await session.call(server.url, call, self._update_timeout)
                except (ServerTrouble, CallRefused, MalformedAnswer) as trouble:
                    self.pool.take_out(server, f"it did not receive new weights: {trouble}")
                    raise TransferError(f"{server.url}: {trouble}") from trouble

            await stream.receive(
                version,
                servers,
                *(first, self._label, self._broadcast_dialect, call, self._ledger.take),
            )
            for server in servers:
                self.pool.put_in(server, self._label)

    @contextlib.asynccontextmanager
    async def _updating(self, session: ServerSession, server: Server) -> AsyncIterator[None]:
        """Keep requests from a server whose weights change; with `interrupts` cut them short."""
        while not server.updating.acquire(blocking=False):
            await asyncio.sleep(_UPDATE_POLL_SECONDS)
        try:
            if self._interrupts and server.label is not None:
                await self._note_interruption(session, server, server.label)
            server.label = None
            interrupts = self._interrupts
            pause, resume = self._broadcast_dialect.pause_calls() if interrupts else ([], [])
            for call in pause:
                await session.call(server.url, call, self._update_timeout)
            yield
            for call in resume:
                await session.call(server.url, call, self._update_timeout)
        finally:
            server.updating.release()

    async def _update(self, session: ServerSession, server: Server) -> str | None:
        """Give `server` the newest weights; the reason if it answered and refused."""
        while not server.updating.acquire(blocking=False):
            await asyncio.sleep(_UPDATE_POLL_SECONDS)  # the other thread revives it
        try:
            return await self._update_alone(session, server)
        finally:
            server.updating.release()

    async def _update_alone(self, session: ServerSession, server: Server) -> str | None:
        label = self._label
        if self._weights is None:
            self.pool.take_out(server, "it lost its weights; it gets the next ones")
            return None
        calls = self._dialect.weight_update(
            self._weights.path_of(label), label, abort=self._interrupts
        )
        if self._interrupts and server.label is not None and server.label != label:
            await self._note_interruption(session, server, server.label)
        # Responses that are answered from here on may come from either weights.
        server.label = None
        try:
            for call in calls:
                await session.call(server.url, call, self._update_timeout)
        except ServerTrouble as trouble:
            self.pool.take_out(server, f"it did not load new weights: {trouble}")
        except (CallRefused, MalformedAnswer) as refusal:
            self.pool.take_out(server, f"it did not load new weights: {refusal}")
            return f"{server.url}: {refusal}"
        else:
            self.pool.put_in(server, label)
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
        label = self._label
        try:
            await session.call(server.url, self._dialect.weight_label(label), _PROBE_TIMEOUT)
        except MalformedAnswer:
            server.tested = False
            await self._update(session, server)
        except (ServerTrouble, CallRefused) as trouble:
            self.pool.take_out(server, str(trouble))
        else:
            self.pool.put_in(server, label)

    async def _revive_due(self, session: ServerSession) -> None:
        now = time.monotonic()
        out = [s for s in self.pool.servers if s.out_because and not s.updating.locked()]
        due = [server for server in out if server.probe_at <= now]
        await asyncio.gather(*(self._revive(session, server) for server in due))

    async def _keep_reviving(self, session: ServerSession, end: asyncio.Event) -> None:
        """Revive servers that are out of service until `end`; waits for a reload that has begun."""
        while not end.is_set():
            await self._revive_due(session)
            try:
                await asyncio.wait_for(end.wait(), _REVIVE_SECONDS)
            except TimeoutError:
                continue

    # -- generation

    def generate(
        self, requests: Sequence[GenerationRequest], parameters: SamplingParameters
    ) -> list[list[Answer]]:
        """For each request, one answer per seed, in order."""
        return generate_by_steps(self, requests, parameters)

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
        """Wait a moment for responses; those that are complete."""
        if not self._interrupts or self._ledger.version == NO_WEIGHTS:
            self._ledger.require_complete(self._name)
        try:
            self._events.run_until_complete(self._advance())
        except BaseException:
            self.abort()
            raise
        finished, self._finished = self._finished, []
        self._running -= len(finished)
        if not self._running:
            self._events.run_until_complete(self._disconnect())
        self._generated_tokens += sum(
            done.answer.tokens.numel() for done in finished if isinstance(done.answer, Generation)
        )
        return finished

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
            await self._revive_due(session)
            reviver = asyncio.create_task(self._keep_reviving(session, end))
            self._connection = (session, end, reviver)
            self._testing = asyncio.Lock()
        session = self._connection[0]
        for ticket, request, parameters in self._new:
            group = self._group(session, ticket, request, parameters)
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
        for task in self._groups:
            task.cancel()
        await asyncio.gather(*self._groups, return_exceptions=True)
        self._groups.clear()
        if self._connection is not None:
            session, end, reviver = self._connection
            self._connection = None
            end.set()
            await reviver
            await session.close()

    async def _test(self, session: ServerSession, server: Server, ask: Ask) -> None:
        """Refuse a server whose log-probs are not those of the sampled distribution."""
        test = self._dialect.self_test(ask.parameters)
        async with self._testing:
            if test is None or server.tested:
                return
            try:
                await session.call(server.url, test, self._request_timeout)
            except (WrongLogProbs, CallRefused) as wrong:
                raise ConfigError(f"--rollout-url {server.url}: {wrong}") from None
            server.tested = True

    async def _group(
        self,
        session: ServerSession,
        ticket: int,
        request: GenerationRequest,
        parameters: SamplingParameters,
    ) -> None:
        """Ask for the responses to one prompt; when one has finally failed, cancel the others."""
        room = self._shape.max_model_len - len(request.prompt)
        asks = [
            Ask(
                request.prompt,
                seed,
                min(room, parameters.max_response_length),
                parameters,
                self._interrupts,
            )
            for seed in request.seeds
        ]
        if room < 1:
            reason = (
                f"a prompt of {len(request.prompt)} tokens leaves no room for a response in "
                f"{self._shape.max_model_len}"
            )
            failure = GenerationFailure(reason)
            self._finished += [Finished(ticket, place, failure) for place in range(len(asks))]
            return
        # Later turns of an episode have the same prompt index and begin with the same tokens.
        prefix = (request.prompt_index, request.prompt[:_TOKENS_OF_A_PREFIX])
        open_tasks = {
            asyncio.create_task(self._response(session, ask, prefix)): place
            for place, ask in enumerate(asks)
        }
        failed: GenerationFailure | None = None
        try:
            while open_tasks and failed is None:
                done, _ = await asyncio.wait(open_tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    answer = task.result()
                    self._finished.append(Finished(ticket, open_tasks.pop(task), answer))
                    if isinstance(answer, GenerationFailure):
                        failed = answer
        finally:
            for task in open_tasks:
                task.cancel()
            await asyncio.gather(*open_tasks, return_exceptions=True)
        if failed is not None:
            reason = f"not waited for: another response to this prompt failed ({failed.reason})"
            rest = [Finished(ticket, n, GenerationFailure(reason)) for n in open_tasks.values()]
            self._finished += rest

    async def _response(self, session: ServerSession, ask: Ask, prefix: Hashable) -> Answer:
        """One response, after as many attempts as it takes and is allowed.

        New weights may cut it into pieces; those cost no attempt.

        prefix: see `ServerPool.pick`
        """
        troubled: Server | None = None
        pieces: list[Generation] = []
        last, attempt, waited = "", 0, False
        while attempt <= self._retries:
            server = self.pool.pick(avoid=troubled, prefix=prefix)
            if server is None and self.pool.is_updating:
                await asyncio.sleep(_UPDATE_POLL_SECONDS)
                continue
            if server is None and not waited:
                waited = True
                await asyncio.sleep(_ALL_OUT_PAUSE)
                continue
            if server is None:
                causes = "; ".join(f"{s.url}: {s.out_because}" for s in self.pool.servers)
                return GenerationFailure(f"no rollout server is in service: {causes}")
            with self.pool.call(server) as known_before:
                try:
                    piece = await self._attempt(session, server, _rest_of(ask, pieces))
                except Overtaken:
                    await asyncio.sleep(_UPDATE_POLL_SECONDS)
                    continue
                except CallRefused as refusal:
                    return GenerationFailure(f"{server.url}: {refusal}")
                except ServerGone as gone:
                    last = f"{server.url}: {gone}"
                    self.pool.take_out(server, str(gone))
                except (ServerTrouble, MalformedAnswer) as trouble:
                    last = f"{server.url}: {trouble}"
                    self.pool.trouble(server, known_before, str(trouble))
                else:
                    server.troubles = 0
                    pieces.append(piece)
                    if piece.finish_reason != "abort":
                        return _joined(pieces)
                    continue
            attempt, troubled = attempt + 1, server
            # Spread, so that clients do not come back together.
            pause = min(self._backoff * 2 ** (attempt - 1), _LONGEST_BACKOFF)
            if attempt <= self._retries:
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        return GenerationFailure(f"{self._retries + 1} attempts failed, the last at {last}")

    async def _attempt(self, session: ServerSession, server: Server, ask: Ask) -> Generation:
        """Ask, parse, and have the weights confirmed afterwards.

        A label is lost with the weights and only this object gives it, so a server that has it
        after the response, or right before an update that came after it, had it during the
        response.
        """
        label = server.label
        if label is None:
            raise Overtaken
        if not server.tested:
            await self._test(session, server, ask)
        call = self._dialect.generation(ask)
        version = self._labels.version_of(label)
        try:
            body = await session.call(server.url, call, self._request_timeout)
            generation = self._dialect.parse(body, ask, self._shape, version)
        except (ServerTrouble, CallRefused, MalformedAnswer):
            if server.interrupted_at == label:
                raise Overtaken from None  # before its first token, or the connection was cut
            raise
        if generation.finish_reason == "abort":
            if server.interrupted_at != label:
                raise MalformedAnswer("finish reason abort, and no new weights were the cause")
            return generation
        said = self._dialect.label_of_response(body)
        del body  # not held while the server is asked again
        if server.label != label and said != label:
            raise Overtaken  # asked before an update, answered after it
        if said is not None and said != label:
            raise ServerGone(f"the response came from weights {said!r}, not {label!r}")
        if said is None:
            await self._confirm(session, server, label)
        return generation

    async def _confirm(self, session: ServerSession, server: Server, label: str) -> None:
        """`ServerGone` unless the server has the weights `label`, or had them until an update."""
        confirm = self._dialect.weight_label(label)
        try:
            await session.call(server.url, confirm, self._request_timeout)
        except (MalformedAnswer, CallRefused) as lost:
            if server.interrupted_at != label:
                raise ServerGone(f"the response cannot be trusted: {lost}") from None


class Overtaken(Exception):
    """The server's weights changed before the response was complete; what came is not used."""


def _rest_of(ask: Ask, pieces: Sequence[Generation]) -> Ask:
    """What is still to be sampled after `pieces`."""
    if not pieces:
        return ask
    prefix = tuple(token for piece in pieces for token in piece.tokens.tolist())
    # The same seed would draw the random numbers again that the prefix was drawn with.
    seed = random.Random(f"{ask.seed}/{len(prefix)}").getrandbits(62)
    prompt, left = (*ask.prompt, *prefix), ask.max_tokens - len(prefix)
    return replace(ask, prompt=prompt, seed=seed, max_tokens=left)


def _joined(pieces: Sequence[Generation]) -> Generation:
    """The pieces as one response; log-probs, routes and versions are those they came with."""
    if len(pieces) == 1:
        return pieces[0]
    routes = None
    for piece in pieces:
        if piece.routed_experts is not None:
            routes = continued_routes(routes, piece.routed_experts)
    log_probs = [piece.log_probs for piece in pieces if piece.log_probs is not None]
    kept = [piece.sampling_mask for piece in pieces if piece.sampling_mask is not None]
    return Generation(
        tokens=torch.cat([piece.tokens for piece in pieces]),
        finish_reason=pieces[-1].finish_reason,
        weight_version=torch.cat([piece.token_versions() for piece in pieces]),
        log_probs=torch.cat(log_probs) if log_probs else None,
        routed_experts=routes,
        sampling_mask=Ragged.concatenated(kept) if kept else None,
    )
