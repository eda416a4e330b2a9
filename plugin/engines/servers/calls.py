"""One HTTP call to a server: a deadline to the last byte, and every way to fail has a name."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import aiohttp

from plugin.errors import EngineError

_RETRIABLE = (408, 425, 429)
_BODIES_AT_ONCE = 16
_BODY_SECONDS = 60.0


@dataclass(frozen=True)
class ServerCall:
    """One HTTP call; `check` raises `MalformedAnswer` on parsed JSON that does not confirm it."""

    path: str
    payload: Mapping[str, Any] | None = None
    method: Literal["GET", "POST"] = "POST"
    check: Callable[[Any], None] = lambda body: None


class MalformedAnswer(EngineError):
    """An answer that arrived but cannot be used; the message says why."""


class ServerTrouble(Exception):
    """A call that may succeed when it is made again, here or elsewhere."""


class ServerGone(ServerTrouble):
    """Nothing listens at the address, or the server has lost its weights."""


class CallRefused(Exception):
    """The server understood the call and refuses it; asking again would not help."""


class ServerSession:
    """Makes calls inside one event loop; what their answers hold in memory is bounded.

    max_answer_bytes: of one answer, decompressed; of all together `_BODIES_AT_ONCE` times as much
    api_key: sent as a bearer token
    """

    def __init__(self, max_answer_bytes: int, api_key: str | None = None) -> None:
        self._max_bytes = max_answer_bytes
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._bodies = asyncio.Semaphore(_BODIES_AT_ONCE)
        # Without limits of its own, and without its decompression, which has no bound.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers={"Accept-Encoding": "gzip"} | headers,
            auto_decompress=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def call(self, url: str, call: ServerCall, timeout: float | None) -> Any:
        """The parsed JSON of a checked answer; None if the answer is empty.

        timeout: seconds; None = the caller has a deadline of its own
        """
        body = parse_json(await self._answer(url, call, timeout))
        call.check(body)
        return body

    async def text(self, url: str, path: str, timeout: float) -> str:
        """What a server answers to GET."""
        answer = await self._answer(url, ServerCall(path, method="GET"), timeout)
        return answer.decode(errors="replace")

    async def _answer(self, url: str, call: ServerCall, timeout: float | None) -> bytearray:
        try:
            # The deadline covers a body that trickles: a timeout per read would never end.
            async with asyncio.timeout(timeout):
                status, text = await self._exchange(url, call)
        except TimeoutError:
            raise ServerTrouble(f"no complete answer within {timeout:g} s") from None
        except aiohttp.ClientConnectorError as error:
            reason = error.os_error.strerror or error.os_error
            raise ServerGone(f"cannot connect: {reason}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerTrouble(f"the connection broke: {error or type(error).__name__}") from None
        if status != 200:
            start = " ".join(text[:300].decode(errors="replace").split())
            if status >= 500 or status in _RETRIABLE:
                raise ServerTrouble(f"HTTP {status}: {start}")
            raise CallRefused(f"HTTP {status} to {call.path}: {start}")
        return text

    async def _exchange(self, url: str, call: ServerCall) -> tuple[int, bytearray]:
        request = self._http.request(
            call.method,
            url + call.path,
            json=call.payload,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=None),
        )
        async with request as response, self._bodies:
            try:
                async with asyncio.timeout(_BODY_SECONDS):
                    return response.status, await self._body(response)
            except TimeoutError:
                # One that trickles must not keep the others from being read.
                raise ServerTrouble(f"the body took longer than {_BODY_SECONDS:g} s") from None

    async def _body(self, response: aiohttp.ClientResponse) -> bytearray:
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding not in ("identity", "gzip"):
            raise MalformedAnswer(f"the answer is encoded as {encoding:.50}; only gzip is read")
        decoder = zlib.decompressobj(wbits=31) if encoding == "gzip" else None
        text = bytearray()
        async for piece in response.content.iter_any():
            room = self._max_bytes - len(text)
            try:
                text += piece if decoder is None else decoder.decompress(piece, room + 1)
            except zlib.error as error:
                raise MalformedAnswer(f"the answer is not gzip: {error}") from None
            if len(text) > self._max_bytes:
                raise MalformedAnswer(
                    f"the answer has more than {self._max_bytes} bytes; if that is how long a good "
                    "one is, raise --max-answer-bytes"
                )
        if decoder is not None and (not decoder.eof or decoder.unused_data):
            raise MalformedAnswer("the answer is cut off, or goes on after its gzip data")
        return text


def parse_json(text: bytes | bytearray) -> Any:
    """The JSON in an answer's body; None if it is empty."""
    if not text.strip():
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise MalformedAnswer(f"the answer is not JSON: {error!s:.200}") from None
    except RecursionError:
        raise MalformedAnswer("the answer is nested too deeply") from None
