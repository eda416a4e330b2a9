"""Reads files, whoever wrote them: JSON Lines (prompts, metrics, dumps), settings, YAML.

Only a line feed ends a line. U+2028, U+2029 and U+0085 end lines for `str.splitlines`, but may
stand unescaped in a JSON string.
"""

from __future__ import annotations

import codecs
import errno
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Of a file of settings, and of what the anchors in one may stand for.
_MOST_BYTES, _MOST_YAML_NODES = 64 << 20, 100_000
#: Of one line: no sample is that long.
_MOST_LINE_BYTES = 256 << 20


def require_file(path: Path) -> None:
    """Raise an `OSError` unless `path` is a regular file: reading others may wait or never end."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, not a file", str(path))


def read_settings(path: Path) -> str:
    """The UTF-8 text of a small file; an `OSError` for one that is too large or no regular file."""
    require_file(path)
    if os.stat(path).st_size > _MOST_BYTES:
        limit = f"it has more than {_MOST_BYTES >> 20} MB, which are no settings"
        raise OSError(errno.EFBIG, limit, str(path))
    return path.read_text(encoding="utf-8")


def parse_yaml(text: str) -> Any:
    """What YAML holds, safe-loaded; a `ValueError` also where its anchors multiply without end."""
    import yaml

    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if node is not None and _yaml_nodes(node, {}) > _MOST_YAML_NODES:
        raise ValueError(f"its anchors stand for more than {_MOST_YAML_NODES} values")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _yaml_nodes(node: Any, counted: dict[int, float]) -> float:
    """How many values a YAML node is, with every anchor written out."""
    if id(node) not in counted:
        counted[id(node)] = float("inf")  # of one that contains itself
        children = node.value if isinstance(node.value, list) else []
        parts = [child if isinstance(child, tuple) else (child,) for child in children]
        counted[id(node)] = 1 + sum(_yaml_nodes(one, counted) for part in parts for one in part)
    return counted[id(node)]


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
    require_file(path)
    with open(path, "rb") as file:
        for number, raw in enumerate(iter(lambda: file.readline(_MOST_LINE_BYTES + 1), b""), 1):
            if len(raw) > _MOST_LINE_BYTES:
                limit = f"longer than {_MOST_LINE_BYTES >> 20} MB; nothing after it is read"
                yield JsonLine(number, len(raw), None, limit)
                return
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
