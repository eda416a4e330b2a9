"""One HTTP call to a server: a deadline to the last byte, and every way to fail has a name."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

from plugin.rollout.engines.server_answers import MalformedAnswer
from plugin.rollout.engines.server_dialects import ServerCall

_LARGEST_ANSWER = 512 << 20
_RETRIABLE = (408, 425, 429)


class ServerTrouble(Exception):
    """A call that may succeed when it is made again, here or elsewhere."""


class ServerGone(ServerTrouble):
    """Nothing listens at the address, or the server has lost its weights."""


class CallRefused(Exception):
    """The server understood the call and refuses it; asking again would not help."""


def new_session(api_key: str | None = None) -> aiohttp.ClientSession:
    """A session without limits of its own, to be used inside one event loop."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers)


async def make_call(
    session: aiohttp.ClientSession, url: str, call: ServerCall, timeout: float
) -> Any:
    """The parsed JSON of a checked answer; None if the answer is empty."""
    try:
        # The deadline covers a body that trickles, for which a timeout per read would never end.
        async with asyncio.timeout(timeout):
            status, text = await _exchange(session, url, call)
    except TimeoutError:
        raise ServerTrouble(f"no complete answer within {timeout:g} s") from None
    except aiohttp.ClientConnectorError as error:
        raise ServerGone(f"cannot connect: {error.os_error.strerror or error.os_error}") from None
    except (aiohttp.ClientError, OSError) as error:
        raise ServerTrouble(f"the connection broke: {error or type(error).__name__}") from None
    if status != 200:
        shown = text[:300].decode(errors="replace")
        if status >= 500 or status in _RETRIABLE:
            raise ServerTrouble(f"HTTP {status}: {shown}")
        raise CallRefused(f"HTTP {status} to {call.path}: {shown}")
    body = _parsed(text)
    call.check(body)
    return body


async def _exchange(
    session: aiohttp.ClientSession, url: str, call: ServerCall
) -> tuple[int, bytes]:
    request = session.request(
        call.method,
        url + call.path,
        json=call.payload,
        allow_redirects=False,
        timeout=aiohttp.ClientTimeout(total=None),
    )
    async with request as response:
        text = bytearray()
        async for piece in response.content.iter_any():
            text += piece
            if len(text) > _LARGEST_ANSWER:
                raise aiohttp.ClientPayloadError(f"more than {_LARGEST_ANSWER} bytes")
        return response.status, bytes(text)


def _parsed(text: bytes) -> Any:
    if not text.strip():
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise MalformedAnswer(f"the answer is not JSON: {error}") from None
