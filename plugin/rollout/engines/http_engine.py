"""The `http` engine: a client of vLLM or SGLang servers that run elsewhere.

Every response is a call of its own, so servers batch as they like. A response is believed if its
tokens and log-probs are complete and the server confirms that it still has the weights it was
given; everything else is asked for again and finally becomes a `GenerationFailure`. No thread, task
or connection outlives a call of this class.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from plugin.config import JobConfig
from plugin.errors import ConfigError, WeightError
from plugin.rollout.engines.choice import api_key
from plugin.rollout.engines.expert_routes import RouteShape
from plugin.rollout.engines.protocol import (
    Answer,
    EngineHealth,
    Generation,
    GenerationFailure,
    GenerationRequest,
    SamplingParameters,
)
from plugin.rollout.engines.server_answers import Ask, MalformedAnswer, WrongLogProbs
from plugin.rollout.engines.server_calls import (
    CallRefused,
    ServerGone,
    ServerSession,
    ServerTrouble,
)
from plugin.rollout.engines.server_dialects import DIALECTS, Dialect, ResponseShape
from plugin.rollout.engines.server_pool import Server, ServerPool
from plugin.rollout.engines.weight_buckets import weight_ledger
from plugin.rollout.engines.weight_directory import WeightDirectory

_PROBE_TIMEOUT = 10.0
_REVIVE_SECONDS = 0.5
_LONGEST_BACKOFF = 15.0
#: Failing at once would make a driver that samples again spin while the servers restart.
_ALL_OUT_PAUSE = 1.0


def make_engine(config: JobConfig, hf_config: Mapping[str, Any], name: str) -> HttpEngine:
    """The engine with the settings of a job."""
    return HttpEngine(
        config.rollout_urls,
        hf_config,
        weights_dir=str(config.rollout_weights_dir),
        server=config.rollout_server,
        request_timeout=config.rollout_request_timeout,
        update_timeout=config.step_timeout,
        retries=config.rollout_request_retries,
        api_key=api_key(config),
        max_batch=config.rollout_max_batch,
        max_answer_bytes=config.max_answer_bytes,
        max_model_len=config.max_context_length,
        name=name,
    )


class HttpEngine:
    """A `RolloutEngine` that asks servers.

    hf_config: of the model that the servers run
    weights_dir: a directory that they see under the same path
    request_timeout: seconds for one response to its last byte
    update_timeout: seconds for loading weights
    retries: attempts after a failed one, `backoff` seconds later at first, then twice as long each
        time
    api_key: sent with every call as a bearer token
    max_batch: responses asked for at the same time
    max_answer_bytes: of one answer, decompressed
    pool: the servers and their state
    """

    def __init__(
        self,
        urls: Sequence[str],
        hf_config: Mapping[str, Any],
        *,
        weights_dir: str,
        server: str = "vllm",
        request_timeout: float = 600.0,
        update_timeout: float = 1800.0,
        retries: int = 3,
        backoff: float = 0.5,
        api_key: str | None = None,
        max_batch: int = 256,
        max_answer_bytes: int = 16 << 20,
        max_model_len: int | None = None,
        name: str = "engine",
    ) -> None:
        if not urls:
            raise ConfigError("--rollout-engine http needs at least one URL; give --rollout-url")
        self._dialect: Dialect = DIALECTS[server]()
        self.pool = ServerPool(urls)
        self._ledger = weight_ledger(hf_config)
        self._weights = WeightDirectory(weights_dir, hf_config)
        positions = int(hf_config.get("max_position_embeddings") or 1 << 20)
        self._shape = ResponseShape(
            vocab_size=int(hf_config["vocab_size"]),
            max_model_len=min(max_model_len or positions, positions),
            num_layers=int(hf_config["num_hidden_layers"]),
            routes=RouteShape.of(hf_config),
        )
        self._request_timeout, self._update_timeout = request_timeout, update_timeout
        self._retries, self._backoff, self._max_batch = retries, backoff, max_batch
        self._name = name
        self._session = partial(ServerSession, max_answer_bytes, api_key)
        self._generated_tokens = 0

    def health(self) -> EngineHealth:
        """Version of the weights and tokens generated so far; says nothing of the servers."""
        return EngineHealth(self._name, self._ledger.version, self._generated_tokens)

    # -- weights

    def load_weights(self, version: int, bucket: bytes | np.ndarray, *, last: bool) -> None:
        """Take a bucket of version `version`; the last one has every server load it from disk.

        A server that does not confirm the version is out of service until it does.
        """
        if not self._ledger.is_partial:
            self._weights.begin()
        self._ledger.load(version, bucket, last=last)
        self._weights.add(bucket)
        if not last:
            return
        self._weights.finish(version)
        asyncio.run(self._distribute())
        self._weights.remove_older()

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

    async def _update(self, session: ServerSession, server: Server) -> str | None:
        """Give `server` the newest weights; the reason if it answered and refused."""
        try:
            for call in self._dialect.weight_update(self._weights.path, str(self._weights.label)):
                await session.call(server.url, call, self._update_timeout)
        except ServerTrouble as trouble:
            self.pool.take_out(server, f"it did not load new weights: {trouble}")
        except (CallRefused, MalformedAnswer) as refusal:
            self.pool.take_out(server, f"it did not load new weights: {refusal}")
            return f"{server.url}: {refusal}"
        else:
            self.pool.put_in(server)
        return None

    async def _revive(self, session: ServerSession, server: Server) -> None:
        """Put a server back that answers, after loading the weights again if it has lost them."""
        label = self._dialect.weight_label(str(self._weights.label))
        try:
            await session.call(server.url, label, _PROBE_TIMEOUT)
        except MalformedAnswer:
            server.tested = False
            await self._update(session, server)
        except (ServerTrouble, CallRefused) as trouble:
            self.pool.take_out(server, str(trouble))
        else:
            self.pool.put_in(server)

    async def _revive_due(self, session: ServerSession) -> None:
        now = time.monotonic()
        due = [s for s in self.pool.servers if s.out_because is not None and s.probe_at <= now]
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
        self._ledger.require_complete(self._name)
        answers = asyncio.run(self._generate(requests, parameters))
        self._generated_tokens += sum(
            answer.tokens.numel()
            for group in answers
            for answer in group
            if isinstance(answer, Generation)
        )
        return answers

    async def _generate(
        self, requests: Sequence[GenerationRequest], parameters: SamplingParameters
    ) -> list[list[Answer]]:
        async with self._session() as session:
            await self._revive_due(session)
            await self._self_test(session, parameters)
            if not self.pool.in_service:
                await asyncio.sleep(_ALL_OUT_PAUSE)
            end, slots = asyncio.Event(), asyncio.Semaphore(self._max_batch)
            reviver = asyncio.create_task(self._keep_reviving(session, end))
            try:
                groups = [self._group(session, slots, r, parameters) for r in requests]
                return list(await asyncio.gather(*groups))
            finally:
                end.set()
                await reviver

    async def _self_test(self, session: ServerSession, parameters: SamplingParameters) -> None:
        """Refuse a server whose log-probs are not those of the sampled distribution."""
        test = self._dialect.self_test(parameters)
        for server in self.pool.in_service if test is not None else ():
            if server.tested or test is None:
                continue
            for attempt in range(self._retries + 1):
                try:
                    await session.call(server.url, test, self._request_timeout)
                    server.tested = True
                    break
                except (WrongLogProbs, CallRefused) as wrong:
                    raise ConfigError(f"--rollout-url {server.url}: {wrong}") from None
                except (ServerTrouble, MalformedAnswer) as trouble:
                    if attempt == self._retries:
                        self.pool.take_out(server, str(trouble))

    async def _group(
        self,
        session: ServerSession,
        slots: asyncio.Semaphore,
        request: GenerationRequest,
        parameters: SamplingParameters,
    ) -> list[Answer]:
        """The responses to one prompt; when one has finally failed, the others are canceled."""
        room = self._shape.max_model_len - len(request.prompt)
        if room < 1:
            reason = (
                f"a prompt of {len(request.prompt)} tokens leaves no room for a response in "
                f"{self._shape.max_model_len}"
            )
            return [GenerationFailure(reason) for _ in request.seeds]
        max_tokens = min(room, parameters.max_response_length)

        async def respond(seed: int) -> Answer:
            async with slots:
                ask = Ask(request.prompt, seed, max_tokens, parameters)
                return await self._response(session, ask)

        return await _until_one_fails([respond(seed) for seed in request.seeds])

    async def _response(self, session: ServerSession, ask: Ask) -> Answer:
        """One response, after as many attempts as it takes and is allowed."""
        server: Server | None = None
        last = ""
        for attempt in range(self._retries + 1):
            if attempt:
                # Spread, so that clients do not come back together.
                pause = min(self._backoff * 2 ** (attempt - 1), _LONGEST_BACKOFF)
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            server = self.pool.pick(avoid=server)
            if server is None:
                causes = "; ".join(f"{s.url}: {s.out_because}" for s in self.pool.servers)
                return GenerationFailure(f"no rollout server is in service: {causes}")
            with self.pool.call(server) as known_before:
                try:
                    answer = await self._attempt(session, server, ask)
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
                    return answer
        return GenerationFailure(f"{self._retries + 1} attempts failed, the last at {last}")

    async def _attempt(self, session: ServerSession, server: Server, ask: Ask) -> Generation:
        """Ask, parse, and have the weights confirmed afterwards.

        A label is lost with the weights and only this object gives it, so a server that has it
        after the response had it during the response.
        """
        call = self._dialect.generation(ask)
        body = await session.call(server.url, call, self._request_timeout)
        generation = self._dialect.parse(body, ask, self._shape, self._ledger.version)
        expected, said = str(self._weights.label), self._dialect.label_of_response(body)
        del body  # not held while the server is asked again
        if said is not None and said != expected:
            raise ServerGone(f"the response came from weights {said!r}, not {expected!r}")
        if said is None:
            confirm = self._dialect.weight_label(expected)
            try:
                await session.call(server.url, confirm, self._request_timeout)
            except (MalformedAnswer, CallRefused) as lost:
                raise ServerGone(f"the response cannot be trusted: {lost}") from None
        return generation


async def _until_one_fails(responses: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """The answers in order; after the first failure the open ones are canceled and fail too."""
    tasks = [asyncio.create_task(response) for response in responses]
    reason = "the call ended"
    try:
        for finished in asyncio.as_completed(tasks):
            answer = await finished
            if isinstance(answer, GenerationFailure):
                reason = f"another response to this prompt failed ({answer.reason})"
                break
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [
        GenerationFailure(f"not waited for: {reason}") if task.cancelled() else task.result()
        for task in tasks
    ]
