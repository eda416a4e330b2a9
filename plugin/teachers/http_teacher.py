"""A teacher behind HTTP: one call per sample, balanced over servers and retried."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from plugin.batch_types import RolloutBatch
from plugin.config import JobConfig
from plugin.config.teachers import TeacherSpec
from plugin.engines.choice import key_in_environment
from plugin.engines.servers.answers import field, shown
from plugin.engines.servers.calls import (
    CallRefused,
    MalformedAnswer,
    ServerCall,
    ServerGone,
    ServerSession,
    ServerTrouble,
)
from plugin.engines.servers.pool import FailedCall, Server, ServerPool
from plugin.errors import ConfigError, EngineError
from plugin.ragged import Ragged
from plugin.teachers.score_dialects import SCORE_DIALECTS, ScoreRequest, Scores

_PROBE_TIMEOUT = 60.0
_IDLE_SECONDS = 0.05
#: Before the second attempt; then twice as long each time.
_BACKOFF_SECONDS = 0.5
#: A teacher's weights never change, so all its servers carry one label.
_LABEL = "teacher"


class HttpTeacher:
    """Scores the policy's tokens with the servers of one teacher.

    vocab_size: of the policy; a server that returns other ids has a different vocabulary
    idle: called now and then while servers work
    """

    def __init__(
        self,
        config: JobConfig,
        spec: TeacherSpec,
        vocab_size: int,
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._config, self._spec, self._vocab_size, self._idle = config, spec, vocab_size, idle
        self._topk = config.distill_topk or 0
        self._dialect = SCORE_DIALECTS[config.teacher_server]()
        api_key = key_in_environment("--teacher-api-key-env", config.teacher_api_key_env)
        self._session = partial(ServerSession, config.max_answer_bytes, api_key)
        self.pool = ServerPool(spec.urls, what="teacher server")
        for server in self.pool.servers:
            self.pool.put_in(server, _LABEL)

    def score(self, batch: RolloutBatch) -> dict[str, Ragged]:
        """The teacher's columns of a batch; an `EngineError` if a sample cannot be scored."""
        columns = batch.columns
        requests = [
            ScoreRequest(tuple(tokens.tolist()), int(length), self._topk)
            for tokens, length in zip(
                columns["unconcat_tokens"], columns["response_lengths"], strict=True
            )
        ]
        scores = asyncio.run(self._score_all(requests))
        found = {"teacher_log_probs": Ragged.of([score.log_probs for score in scores])}
        if self._topk:
            found["teacher_topk_ids"] = Ragged.of([score.topk_ids for score in scores])
            found["teacher_topk_log_probs"] = Ragged.of([score.topk_log_probs for score in scores])
        return found

    async def _score_all(self, requests: Sequence[ScoreRequest]) -> list[Scores]:
        room = asyncio.Semaphore(self._config.teacher_max_batch)
        async with self._session() as session:

            async def one(number: int, request: ScoreRequest) -> Scores:
                async with room:
                    try:
                        return await self._score_one(session, request)
                    except EngineError as error:
                        raise EngineError(f"sample {number}: {error}") from None

            tasks = [asyncio.create_task(one(n, request)) for n, request in enumerate(requests)]
            waiting = set(tasks)
            try:
                while waiting:
                    done, waiting = await asyncio.wait(
                        waiting, timeout=_IDLE_SECONDS, return_when=asyncio.FIRST_EXCEPTION
                    )
                    for task in done:
                        task.result()
                    self._idle()
            finally:
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            return [task.result() for task in tasks]

    async def _score_one(self, session: ServerSession, request: ScoreRequest) -> Scores:
        """Score one sample, with retries on other servers."""
        if not request.response_length:
            empty = torch.zeros(0, request.topk)
            return Scores(torch.zeros(0), empty.int(), empty)

        async def call(server: Server) -> Scores:
            timeout = self._config.teacher_request_timeout
            try:
                body = await session.call(server.url, self._dialect.call(request), timeout)
            except CallRefused as refusal:
                raise EngineError(f"the teacher {server.url} refuses: {refusal}") from None
            return self._dialect.parse(body, request, self._vocab_size)

        retries = self._config.teacher_request_retries
        try:
            return await self.pool.ask(
                call, self._choose, retries=retries, backoff=_BACKOFF_SECONDS
            )
        except FailedCall as failed:
            raise EngineError(
                f"the teacher {self._spec.option} did not score it in {retries + 1} attempts, the "
                f"last: {failed}; repair the server and continue with --resume, or raise "
                "--teacher-request-retries"
            ) from None

    async def _choose(self, avoid: Server | None) -> Server:
        """The server for the next call; one that was out of service for a while is retried."""
        now = time.monotonic()
        for server in self.pool.servers:
            if server.out_because is not None and server.probe_at <= now:
                self.pool.put_in(server, _LABEL)
        found = self.pool.pick(avoid=avoid)
        return found or min(self.pool.servers, key=lambda server: server.probe_at)

    # -- before the job starts

    def check(self, tokenizer: Any, log: Callable[[str], None]) -> None:
        """Refuse servers that do not answer, or have a different vocabulary than `tokenizer`.

        Every server scores the first and the last id of the vocabulary, and tokenizes a text where
        it can.
        """
        asyncio.run(self._check(tokenizer, log))

    async def _check(self, tokenizer: Any, log: Callable[[str], None]) -> None:
        last = self._vocab_size - 1
        probe = ScoreRequest((0, last, 0), 2, self._topk)
        async with self._session() as session:
            for server in self.pool.servers:
                what = f"{self._spec.option} ({server.url})"
                try:
                    # First, because a server without a tokenizer may die of an id that it lacks.
                    await self._compare_tokenizers(session, server, tokenizer, what, log)
                    body = await session.call(server.url, self._dialect.call(probe), _PROBE_TIMEOUT)
                    self._dialect.parse(body, probe, self._vocab_size)
                except ServerGone as gone:
                    raise ConfigError(
                        f"{what}: {gone}; start the teacher before the job, or correct the address"
                    ) from None
                except (CallRefused, MalformedAnswer, ServerTrouble) as refusal:
                    raise ConfigError(
                        f"{what} does not score the tokens 0 and {last}, the first and the last of "
                        f"the policy's vocabulary: {refusal}; serve a teacher with the policy's "
                        "tokenizer, and a vLLM server with --max-logprobs of at least "
                        "--distill-topk"
                    ) from None

    async def _compare_tokenizers(
        self,
        session: ServerSession,
        server: Server,
        tokenizer: Any,
        what: str,
        log: Callable[[str], None],
    ) -> None:
        # Tokens from all over the vocabulary.
        count = min(200, self._vocab_size)
        chosen = sorted(random.Random(0).sample(range(self._vocab_size), count))
        text = tokenizer.decode(chosen, skip_special_tokens=True)
        ours = list(tokenizer.encode(text, add_special_tokens=False))
        call = ServerCall("/tokenize", {"prompt": text, "add_special_tokens": False})
        try:
            body = await session.call(server.url, call, _PROBE_TIMEOUT)
            theirs = field(body, "tokens")
        except ServerGone:
            raise
        except (CallRefused, MalformedAnswer, ServerTrouble) as refusal:
            log(
                f"{what} does not tell how it tokenizes ({str(refusal)[:100]}); only the size "
                "of its vocabulary was compared with the policy's"
            )
            return
        if theirs != ours:
            raise ConfigError(
                f"{what} has a different vocabulary: the policy's tokenizer makes {shown(ours)} of "
                f"{shown(text)}, the teacher's {shown(theirs)}; serve a teacher with the policy's "
                "tokenizer"
            )
