"""The built-in rewards: a response's text against the label of its row, or a server's answer.

A reward is `fn(response, row, **asked) -> float`: `response` is the text without the stop token,
`row` all columns, and `asked` those values of `RewardInput` that the function names as keyword
arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import re
import reprlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from plugin.errors import ConfigError, EngineError
from plugin.rewards.code_tests import code_block, code_tests, tests_problem

Row = Mapping[str, Any]

_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?"
)
# Possessive, and the last one within a line: linear in whatever a model writes.
_CHOICES = (
    re.compile(r"\\boxed\{\s*+(?:\\text\{)?+\s*+\(?([A-Z])\b"),
    re.compile(r"(?i:answer|choice|option)(?i:\s++is)?\s*+:?\s*+\**+\s*+\(?([A-Z])\b"),
    re.compile(r"(?m)^[^\S\n]*+\**+\(?([A-Z])\)?[.):]?\**+[^\S\n]*+$"),
)
_MATH_SECONDS = 5
_MATH_CHARACTERS = 1000
_NUMBER_CHARACTERS = 400
_HTTP_ATTEMPTS = 3
_ANSWER_BYTES = 1 << 16


def exact(response: str, row: Row, *, label: Any) -> float:
    """1 if the response is the label, apart from white space around it."""
    return float(response.strip() == str(label).strip())


def numeric(response: str, row: Row, *, label: Any) -> float:
    """1 if the last number of the response is the label; 1,000.0 is 1000."""
    found = _NUMBER.findall(response)
    return float(bool(found) and _same_number(found[-1], label))


def gsm8k(response: str, row: Row, *, label: Any) -> float:
    """1 if the number after the response's last #### is that of the label."""
    _, mark, answer = response.rpartition("####")
    found = _NUMBER.match(answer.strip().lstrip("$"))
    return float(bool(mark) and found is not None and _same_number(found[0], label))


def boxed(response: str, row: Row, *, label: Any) -> float:
    """1 if the response's last \\boxed{} is mathematically equal to the label (math-verify).

    A box of more than 1,000 characters, and of more than 4 times the label, is wrong.
    """
    answer, wanted = last_boxed(response), _boxed_label(label)
    if answer is None:
        return 0.0
    if answer.split() == wanted.split():
        return 1.0
    if len(answer) > max(_MATH_CHARACTERS, 4 * len(wanted)):
        return 0.0
    from math_verify import parse, verify

    # The library enforces these timeouts itself: a hostile answer counts as wrong, and the process
    # goes on.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    gold, given = (
        parse(f"\\boxed{{{text}}}", parsing_timeout=_MATH_SECONDS) for text in (wanted, answer)
    )
    return float(verify(gold, given, timeout_seconds=_MATH_SECONDS))


def choice(response: str, row: Row, *, label: Any) -> float:
    """1 if the response chooses the label's letter: in a box, after "answer", or on a line."""
    for pattern in _CHOICES:
        found = pattern.findall(response)
        if found:
            return float(found[-1] == _letter(label))
    return 0.0


def json_schema(response: str, row: Row, *, label: Any) -> float:
    """1 if the response, or its last code block, is JSON that the label's schema accepts."""
    import jsonschema
    import referencing

    text = code_block(response, ("json", "")) or response
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return 0.0
    # An empty registry: a schema must not make the job fetch what it refers to.
    validator = jsonschema.Draft202012Validator(_schema(label), registry=referencing.Registry())
    try:
        return float(validator.is_valid(value))
    except (ArithmeticError, RecursionError):  # 1e999, or deeper than Python goes
        return 0.0


def length_penalty(response: str, row: Row, *, num_tokens: int, max_response_length: int) -> float:
    """0 for an empty response, -1 for one of --max-response-length tokens, linear between."""
    return -num_tokens / max_response_length


def http(response: str, row: Row, *, prompt: str, label: Any, url: str, timeout: float) -> float:
    """The number that the server at --reward-url answers, such as a reward model.

    It gets a POST of `{"prompt": ..., "response": ..., "label": ..., "row": {...}}` and answers
    with a number, or with `{"reward": number}`; asked again after a failed connection or a 5xx.
    """
    # Here, so that workers without a server do not load what only a client needs.
    from plugin.engines.servers.calls import CallRefused, MalformedAnswer, ServerTrouble

    body = {"prompt": prompt, "response": response, "label": label, "row": dict(row)}
    plain = json.loads(json.dumps(body, default=str))
    try:
        answer = asyncio.run(_answer(url, plain, time.monotonic() + 0.9 * timeout))
        return _answered_number(answer)
    except (ServerTrouble, CallRefused, MalformedAnswer) as error:
        raise EngineError(f"--reward-url {url}: {error}") from error


async def _answer(url: str, body: Any, deadline: float) -> Any:
    """The JSON that the server answers; asked again, up to `deadline`, where that may help."""
    from plugin.engines.servers.calls import ServerCall, ServerSession, ServerTrouble

    async with ServerSession(_ANSWER_BYTES) as session:
        attempt = 0
        while True:
            attempt += 1
            try:
                patience = max(0.01, deadline - time.monotonic())
                return await session.call(url, ServerCall("", body), patience)
            except ServerTrouble:
                pause = 0.2 * attempt
                if attempt == _HTTP_ATTEMPTS or time.monotonic() + pause > deadline:
                    raise
            await asyncio.sleep(pause)


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{} whose braces are balanced."""
    open_braces: list[int] = []
    start = end = -1
    for brace in re.finditer("[{}]", text):
        if brace[0] == "{":
            open_braces.append(brace.end())
        elif open_braces:
            opened = open_braces.pop()
            if opened > start and text.endswith("\\boxed{", 0, opened):
                start, end = opened, brace.start()
    return None if start < 0 else text[start:end].strip()


def number_problem(label: Any) -> str | None:
    """Why a label has no number."""
    if _label_number(label) is None:
        return f"it is {_shown(label)}; it must be a number, or text with one after ####"
    return None


def text_problem(label: Any) -> str | None:
    """Why a label cannot be compared as text."""
    if isinstance(label, (str, int, float)) and label != "":
        return None
    return f"it is {_shown(label)}; it must be text or a number"


def letter_problem(label: Any) -> str | None:
    """Why a label names no choice."""
    if _letter(label) is None:
        return f"it is {_shown(label)}; it must be one letter, such as B"
    return None


def schema_problem(label: Any) -> str | None:
    """Why a label is not a JSON schema."""
    try:
        import jsonschema
    except ImportError as error:
        raise ConfigError(
            "--reward json_schema needs the package jsonschema; pip install jsonschema"
        ) from error
    try:
        schema = _schema(label)
        jsonschema.Draft202012Validator.check_schema(schema)
    except (ValueError, RecursionError) as error:
        return f"it is text that is not JSON ({error})"
    except jsonschema.SchemaError as error:
        return f"it is no JSON schema ({error.message[:200]})"
    if not isinstance(schema, dict):
        return f"it is {_shown(label)}; it must be a JSON schema, as an object or as JSON text"
    return None


def _same_number(text: str, label: Any) -> bool:
    wanted, found = _label_number(label), _finite(text)
    if wanted is None or found is None:
        return False
    return math.isclose(found, wanted, rel_tol=1e-6, abs_tol=1e-9)


def _label_number(label: Any) -> float | None:
    if isinstance(label, bool):
        return None
    if isinstance(label, (int, float)):
        return _finite(label)
    if not isinstance(label, str):
        return None
    text = label.rpartition("####")[2].strip().strip("$%").strip()
    return _finite(text) if _NUMBER.fullmatch(text) else None


def _finite(number: str | float) -> float | None:
    """A number that a float can hold; the text of one has at most 400 characters."""
    if isinstance(number, str):
        if len(number) > _NUMBER_CHARACTERS:
            return None
        number = number.replace(",", "")
    try:
        value = float(number)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def _boxed_label(label: Any) -> str:
    text = str(label)
    return last_boxed(text) or text.strip().strip("$")


def _letter(label: Any) -> str | None:
    text = label.strip().strip("().").upper() if isinstance(label, str) else ""
    return text if re.fullmatch("[A-Z]", text) else None


def _schema(label: Any) -> Any:
    return json.loads(label) if isinstance(label, str) else label


def _shown(label: Any) -> str:
    return f"{str(label)[:80]!r}, of type {type(label).__name__}"


def _answered_number(answer: Any) -> float:
    from plugin.engines.servers.calls import MalformedAnswer

    value = answer.get("reward") if isinstance(answer, dict) else answer
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an int of 400 digits
            return float(value)
    raise MalformedAnswer(
        f'the answer is {reprlib.repr(answer)}; answer a number or {{"reward": number}}'
    )


#: The text decides: asked again, they say the same.
DETERMINISTIC = (
    *("exact", "numeric", "gsm8k", "boxed", "choice", "json_schema", "code_tests"),
    "length_penalty",
)

LabelProblem = Callable[[Any], str | None]

#: name -> function, what is wrong with a label (None: the label does not matter)
BUILT_IN: dict[str, tuple[Callable[..., float], LabelProblem | None]] = {
    "exact": (exact, text_problem),
    "numeric": (numeric, number_problem),
    "gsm8k": (gsm8k, number_problem),
    "boxed": (boxed, text_problem),
    "choice": (choice, letter_problem),
    "json_schema": (json_schema, schema_problem),
    "code_tests": (code_tests, tests_problem),
    "length_penalty": (length_penalty, None),
    "http": (http, None),
}
