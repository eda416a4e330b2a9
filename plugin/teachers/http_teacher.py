"""A teacher behind HTTP: a call per sample, balanced over servers, made again after trouble."""

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
from plugin.engines.servers.answers import MalformedAnswer, field, shown
from plugin.engines.servers.calls import (
    CallRefused,
    ServerCall,
    ServerGone,
    ServerSession,
    ServerTrouble,
)
from plugin.engines.servers.pool import FailedCall, Server, ServerPool
from plugin.errors import ConfigError, EngineError
from plugin.ragged import Ragged
from plugin.teachers.score_dialects import SCORE_DIALECTS, ScoreAsk, Scores

_PROBE_TIMEOUT = 60.0
_IDLE_SECONDS = 0.05
#: Its weights never change, so one label stands for them all along.
_LABEL = "teacher"


class HttpTeacher:
    """Scores the policy's tokens by asking servers.

    vocab_size: of the policy; a server that names other ids has another vocabulary
    retries, backoff: see `ServerPool.ask`
    idle: called now and then while servers work
    """

    def __init__(
        self,
        spec: TeacherSpec,
        *,
        vocab_size: int,
        server: str = "vllm",
        topk: int = 0,
        request_timeout: float = 600.0,
        retries: int = 3,
        backoff: float = 0.5,
        max_batch: int = 64,
        max_answer_bytes: int = 16 << 20,
        api_key: str | None = None,
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._spec, self._vocab_size, self._topk = spec, vocab_size, topk
        self._dialect = SCORE_DIALECTS[server]()
        self._timeout, self._retries, self._backoff = request_timeout, retries, backoff
        self._max_batch, self._idle = max_batch, idle
        self._session = partial(ServerSession, max_answer_bytes, api_key)
        self.pool = ServerPool(spec.urls, what="teacher server")
        for one in self.pool.servers:
            self.pool.put_in(one, _LABEL)

    @classmethod
    def of(
        cls,
        config: JobConfig,
        spec: TeacherSpec,
        vocab_size: int,
        idle: Callable[[], None] = lambda: None,
    ) -> HttpTeacher:
        """The teacher with the settings of a job."""
        return cls(
            spec,
            vocab_size=vocab_size,
            server=config.teacher_server,
            topk=config.distill_topk or 0,
            request_timeout=config.teacher_request_timeout,
            retries=config.teacher_request_retries,
            max_batch=config.teacher_max_batch,
            max_answer_bytes=config.max_answer_bytes,
            api_key=key_in_environment("--teacher-api-key-env", config.teacher_api_key_env),
            idle=idle,
        )

    def score(self, batch: RolloutBatch) -> dict[str, Ragged]:
        """The columns that a teacher fills in; an `EngineError` if a sample cannot be scored."""
        columns = batch.columns
        asks = [
            ScoreAsk(tuple(tokens.tolist()), int(length), self._topk)
            for tokens, length in zip(
                columns["unconcat_tokens"], columns["response_lengths"], strict=True
            )
        ]
        scores = asyncio.run(self._score_all(asks))
        found = {"teacher_log_probs": Ragged.of([score.log_probs for score in scores])}
        if self._topk:
            found["teacher_topk_ids"] = Ragged.of([score.topk_ids for score in scores])
            found["teacher_topk_log_probs"] = Ragged.of([score.topk_log_probs for score in scores])
        return found

    async def _score_all(self, asks: Sequence[ScoreAsk]) -> list[Scores]:
        room = asyncio.Semaphore(self._max_batch)
        async with self._session() as session:

            async def one(number: int, ask: ScoreAsk) -> Scores:
                async with room:
                    try:
                        return await self._scored(session, ask)
                    except EngineError as error:
                        raise EngineError(f"sample {number}: {error}") from None

            tasks = [asyncio.create_task(one(n, ask)) for n, ask in enumerate(asks)]
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

    async def _scored(self, session: ServerSession, ask: ScoreAsk) -> Scores:
        """One sample, after as many attempts as it takes and is allowed."""
        if not ask.response_length:
            empty = torch.zeros(0, ask.topk)
            return Scores(torch.zeros(0), empty.int(), empty)

        async def call(server: Server) -> Scores:
            try:
                body = await session.call(server.url, self._dialect.call(ask), self._timeout)
            except CallRefused as refusal:
                raise EngineError(f"the teacher {server.url} refuses: {refusal}") from None
            return self._dialect.parse(body, ask, self._vocab_size)

        try:
            return await self.pool.ask(
                call, self._choose, retries=self._retries, backoff=self._backoff
            )
        except FailedCall as failed:
            raise EngineError(
                f"the teacher {self._spec.option} did not score it in {self._retries + 1} "
                f"attempts, the last: {failed}; repair the server and go on with --resume, or "
                "raise --teacher-request-retries"
            ) from None

    async def _choose(self, avoid: Server | None) -> Server:
        """The one to ask; one that was out of service for a while is given another try."""
        now = time.monotonic()
        for server in self.pool.servers:
            if server.out_because is not None and server.probe_at <= now:
                self.pool.put_in(server, _LABEL)
        found = self.pool.pick(avoid=avoid)
        return found or min(self.pool.servers, key=lambda server: server.probe_at)

    # -- before the job starts

    def check(self, tokenizer: Any, log: Callable[[str], None]) -> None:
        """Refuse servers that do not answer, or have another vocabulary than `tokenizer`.

        Every server scores the first and the last id of the vocabulary, and tokenizes a text where
        it can.
        """
        asyncio.run(self._check(tokenizer, log))

    async def _check(self, tokenizer: Any, log: Callable[[str], None]) -> None:
        last = self._vocab_size - 1
        probe = ScoreAsk((0, last, 0), 2, self._topk)
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
        text = sample_text(tokenizer, self._vocab_size)
        ours = list(tokenizer.encode(text, add_special_tokens=False))
        call = ServerCall("/tokenize", {"prompt": text, "add_special_tokens": False})
        try:
            body = await session.call(server.url, call, _PROBE_TIMEOUT)
            theirs = field(body, "tokens")
        except ServerGone:
            raise
        except (CallRefused, MalformedAnswer, ServerTrouble) as refusal:
            log(
                f"{what} does not tell how it tokenizes ({str(refusal)[:100]}); that its "
                "vocabulary is the policy's is known of the number of ids alone"
            )
            return
        if theirs != ours:
            raise ConfigError(
                f"{what} has another vocabulary: the policy's tokenizer makes {shown(ours)} of "
                f"{shown(text)}, the teacher's {shown(theirs)}; serve a teacher with the policy's "
                "tokenizer"
            )


def sample_text(tokenizer: Any, vocab_size: int, count: int = 200) -> str:
    """A text of tokens from all over the vocabulary, for comparing tokenizers."""
    chosen = sorted(random.Random(0).sample(range(vocab_size), min(count, vocab_size)))
    return tokenizer.decode(chosen, skip_special_tokens=True)
