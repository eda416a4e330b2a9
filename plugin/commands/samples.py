"""`megatron-tis samples RUN_DIR`: print prompts, responses and rewards."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

from plugin.errors import ConfigError
from plugin.observe.run_record import read_samples

_SHORT_LINES = 6
_SORT_KEYS = {"step": "step", "reward": "reward", "length": "tokens"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the sub-command."""
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of a finished or running job")
    parser.add_argument(
        "--steps", metavar="N[-M]", help="a step or a range of steps; default: the last samples"
    )
    parser.add_argument(
        "--kind", choices=("best", "worst", "random"), help="only samples of this kind"
    )
    parser.add_argument("--search", metavar="TEXT", help="only samples that hold this text")
    parser.add_argument("--sort", choices=tuple(_SORT_KEYS), default="step", help="default: step")
    parser.add_argument("--descending", action="store_true", help="largest first")
    parser.add_argument(
        "--limit", type=int, default=10, metavar="N", help="how many to print (default: 10)"
    )
    parser.add_argument(
        "--full", action="store_true", help="whole texts instead of their first lines"
    )


def run(args: argparse.Namespace) -> int:
    """Print the samples that are asked for."""
    if args.limit < 1:
        raise ConfigError(f"--limit is {args.limit}; it must be at least 1")
    samples = [sample for sample in read_samples(args.run_dir) if _wanted(sample, args)]
    if not samples:
        print("no such sample")
        return 0
    key = _SORT_KEYS[args.sort]
    if args.sort != "step" or args.descending or args.steps:
        samples.sort(key=lambda sample: _number(sample.get(key)), reverse=args.descending)
        shown = samples[: args.limit]
    else:
        shown = samples[-args.limit :]
    width = max(40, shutil.get_terminal_size((100, 24)).columns)
    for sample in shown:
        print("\n".join(_lines(sample, width, full=args.full)) + "\n")
    if len(shown) < len(samples):
        print(f"{len(shown)} of {len(samples)} samples; --limit shows more")
    return 0


def _wanted(sample: dict[str, Any], args: argparse.Namespace) -> bool:
    first, last = _step_range(args.steps)
    return (
        first <= _number(sample.get("step")) <= last
        and args.kind in (None, sample.get("kind"))
        and (
            args.search is None
            or any(args.search in str(sample.get(name, "")) for name in ("prompt", "response"))
        )
    )


def _step_range(text: str | None) -> tuple[float, float]:
    if text is None:
        return float("-inf"), float("inf")
    found = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", text)
    if found is None:
        raise ConfigError(f"--steps is {text!r}; give a step or a range, such as 12 or 10-20")
    first = int(found[1])
    return first, int(found[2]) if found[2] else first


def _lines(sample: dict[str, Any], width: int, *, full: bool) -> Iterator[str]:
    parts = sample.get("rewards")
    named = parts.items() if isinstance(parts, dict) else ()
    each = ", ".join(f"{printable(str(name))} {_number(value):.4g}" for name, value in named)
    facts = [
        f"step {sample.get('step')}",
        printable(str(sample.get("kind"))),
        f"reward {_number(sample.get('reward')):.4g}" + (f" ({each})" if each else ""),
        f"{sample.get('tokens')} tokens" + (", truncated" if sample.get("truncated") else ""),
        f"prompt {sample.get('prompt_index')}",
    ]
    yield from textwrap.wrap(" | ".join(facts), width)
    for name in ("prompt", "response"):
        text = _wrapped(printable(str(sample.get(name, ""))), width - 12)
        for number, line in enumerate(text if full else text[:_SHORT_LINES]):
            yield f"  {name if number == 0 else '':8}  {line}"
        if not full and len(text) > _SHORT_LINES:
            yield f"{'':12}[{len(text) - _SHORT_LINES} more lines; --full shows them]"


def _wrapped(text: str, width: int) -> list[str]:
    return [
        piece
        for line in text.split("\n")
        for piece in textwrap.wrap(line, width, drop_whitespace=False, replace_whitespace=False)
        or [""]
    ]


def printable(text: str) -> str:
    """`text` without what would steer the terminal: control characters are shown, not sent."""
    return "".join(
        c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")
