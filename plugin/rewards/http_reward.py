"""The reward `http`: a server of the user's own, such as a reward model, at --reward-url.

It gets a POST of `{"prompt": ..., "response": ..., "label": ..., "row": {...}}` and answers with a
number, or with `{"reward": number}`.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from plugin.errors import EngineError

_TRIES = 3
_ANSWER_BYTES = 1 << 16


def http(
    response: str, row: Mapping[str, Any], *, prompt: str, label: Any, url: str, timeout: float
) -> float:
    """The number that the server answers; asked again after a failed connection or a 5xx."""
    body = {"prompt": prompt, "response": response, "label": label, "row": dict(row)}
    request = urllib.request.Request(
        url,
        data=json.dumps(body, default=str).encode(),
        headers={"Content-Type": "application/json"},
    )
    deadline = time.monotonic() + 0.9 * timeout
    for attempt in range(1, _TRIES + 1):
        try:
            patience = max(0.01, deadline - time.monotonic())
            with _opener().open(request, timeout=patience) as answer:
                return _number(answer.read(_ANSWER_BYTES), url)
        except OSError as error:
            refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
            pause = 0.2 * attempt
            if refused or attempt == _TRIES or time.monotonic() + pause > deadline:
                raise EngineError(f"--reward-url {url}: {error}") from error
            time.sleep(pause)
    raise AssertionError("unreachable")


def _opener() -> urllib.request.OpenerDirector:
    # Without the proxies of the environment: rows must not pass through a third machine.
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _number(answer: bytes, url: str) -> float:
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        value = value.get("reward")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise EngineError(
            f'--reward-url {url} answered {answer[:100]!r}; answer a number or {{"reward": number}}'
        )
    return float(value)
