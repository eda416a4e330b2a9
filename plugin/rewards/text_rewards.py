"""The built-in rewards that compare a response's text with the label of its row.

A reward is `fn(response, row, **asked) -> float`: `response` is the text without the stop token,
`row` all columns, and `asked` those values of `RewardInput` that the function names as keyword
arguments.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from typing import Any

from plugin.errors import ConfigError

Row = Mapping[str, Any]

_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?"
)
_CHOICES = (
    re.compile(r"\\boxed\{\s*(?:\\text\{)?\s*\(?([A-Z])\b"),
    re.compile(r"(?i:answer|choice|option)(?i:\s+is)?\s*:?\s*\**\s*\(?([A-Z])\b"),
    re.compile(r"(?m)^\s*\**\(?([A-Z])\)?[.):]?\**\s*$"),
)
_FENCE = re.compile(r"```[ \t]*([\w+-]*)[ \t]*\r?\n(.*?)```", re.DOTALL)
_MATH_SECONDS = 5


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
    """1 if the response's last \\boxed{} is mathematically equal to the label (math-verify)."""
    answer, wanted = last_boxed(response), _boxed_label(label)
    if answer is None:
        return 0.0
    if answer.split() == wanted.split():
        return 1.0
    from math_verify import parse, verify

    # Of the library, which bounds the time by itself: a hostile answer then is wrong, and the
    # process goes on.
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
    # An own registry: a schema must not make the job fetch what it refers to.
    validator = jsonschema.Draft202012Validator(_schema(label), registry=referencing.Registry())
    return float(validator.is_valid(value))


def length_penalty(response: str, row: Row, *, num_tokens: int, max_response_length: int) -> float:
    """0 for an empty response, -1 for one of --max-response-length tokens, linear between."""
    return -num_tokens / max_response_length


def last_boxed(text: str) -> str | None:
    """What is inside of the last \\boxed{} whose braces are balanced."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth = 0
        for position in range(start + 6, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start + 7 : position].strip()
        start = text.rfind("\\boxed{", 0, start)
    return None


def code_block(text: str, languages: tuple[str, ...]) -> str | None:
    """The last fenced block in one of `languages`; '' is a block without a name."""
    found = [code for language, code in _FENCE.findall(text) if language.lower() in languages]
    return found[-1] if found else None


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
    """Why a label is no JSON schema."""
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
    wanted = _label_number(label)
    return wanted is not None and math.isclose(
        float(text.replace(",", "")), wanted, rel_tol=1e-6, abs_tol=1e-9
    )


def _label_number(label: Any) -> float | None:
    if isinstance(label, bool):
        return None
    if isinstance(label, (int, float)):
        return float(label) if math.isfinite(label) else None
    if not isinstance(label, str):
        return None
    text = label.rpartition("####")[2].strip().strip("$%").strip()
    return float(text.replace(",", "")) if _NUMBER.fullmatch(text) else None


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
