"""Reads JSON Lines files, whoever wrote them: prompts, metrics, dumps.

Only a line feed ends a line. U+2028, U+2029 and U+0085 end lines for `str.splitlines`, but may
stand unescaped in a JSON string.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class JsonLine:
    """A line that is not blank.

    number: from 1 on
    size: in bytes
    value: the object in it; None if it could not be read; `problem` says why
    """

    number: int
    size: int
    value: dict[str, Any] | None
    problem: str = ""


def read_json_lines(path: Path) -> Iterator[JsonLine]:
    """The lines of `path` that are not blank; raises only `OSError`."""
    offset = 0
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            text = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            if text.strip():
                value, problem = _parse(text, offset + len(raw) - len(text), path)
                yield JsonLine(number, len(raw), value, problem)
            offset += len(raw)


def _parse(raw: bytes, offset: int, path: Path) -> tuple[dict[str, Any] | None, str]:
    try:
        value = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        return None, _other_encoding(raw, offset + error.start, path)
    except RecursionError:
        return None, "nested too deeply"
    except ValueError as error:
        if b"\0" in raw:
            return None, _other_encoding(raw, offset + raw.index(b"\0"), path)
        return None, f"not JSON ({error})"
    if not isinstance(value, dict):
        return None, f"{type(value).__name__} instead of a JSON object"
    return value, ""


def _other_encoding(raw: bytes, position: int, path: Path) -> str:
    wide = b"\0" in raw or raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    likely = "UTF-16" if wide else "ISO-8859-1"
    return (
        f"not UTF-8 at byte {position} of the file; if it is {likely}, convert it with: iconv -f "
        f"{likely} -t UTF-8 {path.name}"
    )
