"""Responses from servers: asked for until one can be believed, or its attempts are used up.

A response is believed if its tokens and log-probs are complete and the server confirms that it
still has the weights it was given. Everything else is asked for again and finally becomes a
`GenerationFailure`. New weights may cut a response into pieces: the rest is asked for with the
prompt and what was sampled so far, prefilled again with the new weights.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from plugin.batch_types import SamplerHead
from plugin.engines.expert_routes import continued_routes
from plugin.engines.protocol import (
    Answer,
    Finished,
    Generation,
    GenerationFailure,
    GenerationRequest,
    SamplingParameters,
)
from plugin.engines.servers.answers import WrongLogProbs
from plugin.engines.servers.calls import (
    CallRefused,
    MalformedAnswer,
    ServerGone,
    ServerSession,
    ServerTrouble,
)
from plugin.engines.servers.dialects import Dialect
from plugin.engines.servers.pool import (
    UPDATE_POLL_SECONDS,
    FailedCall,
    Server,
    ServerPool,
    WeightsChanged,
)
from plugin.engines.servers.progress import while_it_generates
from plugin.engines.servers.updates import version_of
from plugin.errors import ConfigError
from plugin.ragged import Ragged

#: Failing at once would make a driver that samples again spin while the servers restart.
_ALL_OUT_PAUSE = 1.0
_TOKENS_OF_A_PREFIX = 16


class ServerResponses:
    """Asks the servers of a pool for responses.

    timeout, silence, is_final: seconds for one response, see `while_it_generates`
    retries, backoff: see `ServerPool.ask`
    """

    def __init__(
        self,
        dialect: Dialect,
        pool: ServerPool,
        *,
        timeout: float,
        silence: float,
        is_final: bool,
        retries: int,
        backoff: float,
    ) -> None:
        self._dialect, self._pool = dialect, pool
        self._timeout, self._retries, self._backoff = timeout, retries, backoff
        self._limits: dict[str, Any] = {
            "timeout": timeout,
            "silence": silence,
            "is_final": is_final,
        }
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

        take: called with every response when it is complete
        only: the one server that is asked; None = any
        """
        longest = self._dialect.shape.max_model_len
        room = longest - len(request.prompt)
        if room < 1:
            failure = GenerationFailure(
                f"a prompt of {len(request.prompt)} tokens leaves no room for a response in "
                f"{longest}"
            )
            for place in range(len(request.seeds)):
                take(Finished(ticket, place, failure))
            return
        parameters = replace(
            parameters, max_response_length=min(room, parameters.max_response_length)
        )
        open_tasks = {
            asyncio.create_task(
                self._response(session, replace(request, seeds=(seed,)), parameters, only)
            ): place
            for place, seed in enumerate(request.seeds)
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
        self,
        session: ServerSession,
        request: GenerationRequest,
        parameters: SamplingParameters,
        only: Server | None,
    ) -> Answer:
        """One response, with retries.

        New weights may cut it into pieces; those cost no attempt.
        """
        # Later turns of an episode have the same prompt index and begin with the same tokens.
        prefix = (request.prompt_index, request.prompt[:_TOKENS_OF_A_PREFIX])
        pieces: list[Generation] = []
        waited = False

        async def choose(avoid: Server | None) -> Server:
            nonlocal waited
            while (server := self._pool.pick(avoid, prefix, only)) is None:
                if self._pool.is_updating:
                    await asyncio.sleep(UPDATE_POLL_SECONDS)
                elif not waited:
                    waited = True
                    await asyncio.sleep(_ALL_OUT_PAUSE)
                else:
                    causes = "; ".join(f"{s.url}: {s.out_because}" for s in self._pool.servers)
                    raise CallRefused(f"no rollout server is in service: {causes}")
            return server

        async def call(server: Server) -> Generation | None:
            rest, left = _rest_of(request, parameters, pieces)
            pieces.append(await self._attempt(session, server, rest, left))
            return None if pieces[-1].finish_reason == "abort" else _joined(pieces)

        try:
            return await self._pool.ask(call, choose, retries=self._retries, backoff=self._backoff)
        except CallRefused as refusal:
            return GenerationFailure(str(refusal))
        except FailedCall as failed:
            return GenerationFailure(f"{self._retries + 1} attempts failed, the last at {failed}")

    async def _attempt(
        self,
        session: ServerSession,
        server: Server,
        request: GenerationRequest,
        parameters: SamplingParameters,
    ) -> Generation:
        """Request a response, parse it, and then have the server confirm its weights.

        A label is lost with the weights and only this object gives it, so a server that has it
        after the response, or right before an update that came after it, had it during the
        response.
        """
        label = server.label
        if label is None:
            raise WeightsChanged
        if not server.tested:
            await self._test(session, server, parameters)
        call = self._dialect.generation(request, parameters)
        version = version_of(label)
        try:
            asked = session.call(server.url, call, None)
            body = await while_it_generates(server, asked, **self._limits)
            generation = self._dialect.parse(body, request, parameters, version)
        except (ServerTrouble, CallRefused, MalformedAnswer):
            if server.interrupted_at == label:
                raise WeightsChanged from None  # before its first token, or the connection was cut
            raise
        if generation.finish_reason == "abort":
            if server.interrupted_at != label:
                raise MalformedAnswer("finish reason abort, and no new weights were the cause")
            return generation
        reported = self._dialect.label_of_response(body)
        del body  # not held while the server is asked again
        if server.label != label and reported != label:
            raise WeightsChanged  # asked before an update, answered after it
        if reported is not None and reported != label:
            raise ServerGone(f"the response came from weights {reported!r}, not {label!r}")
        if reported is None:
            try:
                await session.call(server.url, self._dialect.weight_label(label), self._timeout)
            except (MalformedAnswer, CallRefused) as lost:
                if server.interrupted_at != label:  # it had them until an update
                    raise ServerGone(f"the response cannot be trusted: {lost}") from None
        return generation

    async def _test(
        self, session: ServerSession, server: Server, parameters: SamplingParameters
    ) -> None:
        """Refuse a server whose log-probs are not those of the sampled distribution."""
        test = self._dialect.self_test(parameters)
        async with self._testing:
            if test is None or server.tested:
                return
            try:
                await session.call(server.url, test, self._timeout)
            except (WrongLogProbs, CallRefused) as wrong:
                raise ConfigError(f"--rollout-url {server.url}: {wrong}") from None
            server.tested = True


def _rest_of(
    request: GenerationRequest, parameters: SamplingParameters, pieces: Sequence[Generation]
) -> tuple[GenerationRequest, SamplingParameters]:
    """What is still to be sampled after `pieces`."""
    if not pieces:
        return request, parameters
    prefix = tuple(token for piece in pieces for token in piece.tokens.tolist())
    # The same seed would draw the random numbers again that the prefix was drawn with.
    seed = random.Random(f"{request.seeds[0]}/{len(prefix)}").getrandbits(62)
    left = parameters.max_response_length - len(prefix)
    return (
        replace(request, prompt=(*request.prompt, *prefix), seeds=(seed,)),
        replace(parameters, max_response_length=left),
    )


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
    heads = [piece.head for piece in pieces if piece.head is not None]
    return Generation(
        tokens=torch.cat([piece.tokens for piece in pieces]),
        finish_reason=pieces[-1].finish_reason,
        weight_version=torch.cat([piece.token_versions() for piece in pieces]),
        log_probs=torch.cat(log_probs) if log_probs else None,
        routed_experts=routes,
        sampling_mask=Ragged.concatenated(kept) if kept else None,
        head=SamplerHead.joined(heads) if heads else None,
    )
