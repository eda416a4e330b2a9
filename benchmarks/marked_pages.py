"""Parts of documentation pages that benchmarks write, between two comments; nothing there is written by hand."""

from __future__ import annotations

from pathlib import Path


def marked(page: Path, name: str) -> str:
    """What `page` holds between the marks of `name`."""
    begin, end = _marks(name)
    return page.read_text().split(begin)[1].split(end)[0].strip()


def write_marked(page: Path, name: str, text: str) -> None:
    """Put `text` between the marks of `name`."""
    begin, end = _marks(name)
    before, rest = page.read_text().split(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
