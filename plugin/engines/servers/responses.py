"""Responses from servers: asked for until one can be believed, or its attempts are used up.

A response is believed if its tokens and log-probs are complete and the server confirms that it
still has the weights it was given. Everything else is asked for again and finally becomes a
`GenerationFailure`. New weights may cut a response into pieces: the rest is asked for with the
prompt and what was sampled so far, read anew with the new weights.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch

from plugin.engines.expert_routes import continued_routes
from plugin.engines.protocol import (
    Answer,
    Finished,
    Generation,
    GenerationFailure,
    GenerationRequest,
    SamplingParameters,
)
from plugin.engines.servers.answers import Ask, MalformedAnswer, WrongLogProbs
from plugin.engines.servers.calls import (
    CallRefused,
    ServerGone,
    ServerSession,
    ServerTrouble,
)
from plugin.engines.servers.dialects import Dialect, ResponseShape
from plugin.engines.servers.pool import (
    UPDATE_POLL_SECONDS,
    FailedCall,
    Server,
    ServerPool,
    backoff_seconds,
)
from plugin.engines.servers.updates import version_of
from plugin.errors import ConfigError
from plugin.ragged import Ragged

#: Failing at once would make a driver that samples again spin while the servers restart.
_ALL_OUT_PAUSE = 1.0
_TOKENS_OF_A_PREFIX = 16


class ServerResponses:
    """Asks the servers of a pool for responses.

    timeout: seconds for one response to its last byte
    retries: attempts after a failed one, `backoff` seconds later at first, then twice as long each
        time
    interrupts: whether new weights may cut responses short
    """

    def __init__(
        self,
        dialect: Dialect,
        pool: ServerPool,
        shape: ResponseShape,
        *,
        timeout: float,
        retries: int,
        backoff: float,
        interrupts: bool,
    ) -> None:
        self._dialect, self._pool, self._shape = dialect, pool, shape
        self._timeout, self._retries, self._backoff = timeout, retries, backoff
        self._interrupts = interrupts
        self._testing = asyncio.Lock()

    async def ask_for_group(
        self,
        session: ServerSession,
        ticket: int,
        request: GenerationRequest,
        parameters: SamplingParameters,
        take: Callable[[Finished], None],
        only: Server | None = None,
    ) -> None:
        """Ask for the responses to one prompt; when one has finally failed, cancel the others.

        take: is given every response as it is complete
        only: the one server that is asked; None = any
        """
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
            for place in range(len(asks)):
                take(Finished(ticket, place, failure))
            return
        # Later turns of an episode have the same prompt index and begin with the same tokens.
        prefix = (request.prompt_index, request.prompt[:_TOKENS_OF_A_PREFIX])
        open_tasks = {
            asyncio.create_task(self._response(session, ask, prefix, only)): place
            for place, ask in enumerate(asks)
        }
        failed: GenerationFailure | None = None
        try:
            while open_tasks and failed is None:
                done, _ = await asyncio.wait(open_tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    answer = task.result()
                    take(Finished(ticket, open_tasks.pop(task), answer))
                    if isinstance(answer, GenerationFailure):
                        failed = answer
        finally:
            for task in open_tasks:
                task.cancel()
            await asyncio.gather(*open_tasks, return_exceptions=True)
        if failed is not None:
            reason = f"not waited for: another response to this prompt failed ({failed.reason})"
            for place in open_tasks.values():
                take(Finished(ticket, place, GenerationFailure(reason)))

    async def _response(
        self, session: ServerSession, ask: Ask, prefix: Hashable, only: Server | None
    ) -> Answer:
        """One response, after as many attempts as it takes and is allowed.

        New weights may cut it into pieces; those cost no attempt.

        prefix, only: see `ServerPool.pick`
        """
        troubled: Server | None = None
        pieces: list[Generation] = []
        last, attempt, waited = "", 0, False
        while attempt <= self._retries:
            server = self._pool.pick(avoid=troubled, prefix=prefix, only=only)
            if server is None and self._pool.is_updating:
                await asyncio.sleep(UPDATE_POLL_SECONDS)
                continue
            if server is None and not waited:
                waited = True
                await asyncio.sleep(_ALL_OUT_PAUSE)
                continue
            if server is None:
                causes = "; ".join(f"{s.url}: {s.out_because}" for s in self._pool.servers)
                return GenerationFailure(f"no rollout server is in service: {causes}")
            try:
                with self._pool.call(server):
                    piece = await self._attempt(session, server, _rest_of(ask, pieces))
            except Overtaken:
                await asyncio.sleep(UPDATE_POLL_SECONDS)
            except CallRefused as refusal:
                return GenerationFailure(f"{server.url}: {refusal}")
            except FailedCall as failed:
                attempt, troubled, last = attempt + 1, server, str(failed)
                if attempt <= self._retries:
                    await asyncio.sleep(backoff_seconds(attempt, self._backoff))
            else:
                pieces.append(piece)
                if piece.finish_reason != "abort":
                    return _joined(pieces)
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
        version = version_of(label)
        try:
            body = await session.call(server.url, call, self._timeout)
            generation = self._dialect.parse(body, ask, self._shape, version)
        except (ServerTrouble, CallRefused, MalformedAnswer):
            if server.interrupted_at == label:
                raise Overtaken from None  # before its first token, or the connection was cut
            raise
        if generation.finish_reason == "abort":
            if server.interrupted_at != label:
                raise MalformedAnswer("finish reason abort, and no new weights were the cause")
            return generation
        reported = self._dialect.label_of_response(body)
        del body  # not held while the server is asked again
        if server.label != label and reported != label:
            raise Overtaken  # asked before an update, answered after it
        if reported is not None and reported != label:
            raise ServerGone(f"the response came from weights {reported!r}, not {label!r}")
        if reported is None:
            await self._confirm(session, server, label)
        return generation

    async def _confirm(self, session: ServerSession, server: Server, label: str) -> None:
        """`ServerGone` unless the server has the weights `label`, or had them until an update."""
        confirm = self._dialect.weight_label(label)
        try:
            await session.call(server.url, confirm, self._timeout)
        except (MalformedAnswer, CallRefused) as lost:
            if server.interrupted_at != label:
                raise ServerGone(f"the response cannot be trusted: {lost}") from None

    async def _test(self, session: ServerSession, server: Server, ask: Ask) -> None:
        """Refuse a server whose log-probs are not those of the sampled distribution."""
        test = self._dialect.self_test(ask.parameters)
        async with self._testing:
            if test is None or server.tested:
                return
            try:
                await session.call(server.url, test, self._timeout)
            except (WrongLogProbs, CallRefused) as wrong:
                raise ConfigError(f"--rollout-url {server.url}: {wrong}") from None
            server.tested = True


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
