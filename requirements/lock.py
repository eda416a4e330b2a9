"""Writes requirements/cpu.txt: `pip freeze | python requirements/lock.py`, with all hashes.

The hashes are those that pip's index (PIP_INDEX_URL) names, of every source archive and of every
wheel for Linux and macOS that the supported versions of Python can use, so that one file serves
every machine; nothing is downloaded. A mirror that rebuilds files names other hashes than pypi.org;
a lock that was written from it refuses the files of everybody else, and CI shows that.
"""

from __future__ import annotations

import os
import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from pathlib import Path

TARGET = Path(__file__).parent / "cpu.txt"
HEADER = """\
# Everything `make venv` installs on top of torch, with hashes: pip installs no other files. torch
# differs by index (CPU or CUDA build) and comes before. Written by `make lock`.
"""
INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
PYTHONS = (311, 312, 313)

_LINK = re.compile(r'<a\b[^>]*?href="([^"]+)"[^>]*>\s*([^<]+?)\s*</a>')
_HASH = re.compile(r"#sha256=([0-9a-f]{64})")
_PLATFORM = re.compile(
    r"any|manylinux\S*_(?:x86_64|aarch64)|macosx_\S*_(?:x86_64|arm64|universal2)"
)


def is_of_version(file: str, name: str, version: str) -> bool:
    """Whether a file of a package's page belongs to `version`."""
    package = re.escape(name).replace(r"\-", "[-_.]+")
    source = rf"{package}-{re.escape(version)}\.(?:tar\.gz|zip|tar\.bz2)"
    wheel = rf"{package}-{re.escape(version)}-.*\.whl"
    return re.fullmatch(f"{source}|{wheel}", file, re.IGNORECASE) is not None


def is_wanted(file: str) -> bool:
    """Whether a supported Python on Linux or macOS may install the file."""
    if not file.endswith(".whl"):
        return True
    pythons, abi, platforms = file.removesuffix(".whl").rsplit("-", 3)[-3:]
    if not any(_PLATFORM.fullmatch(platform) for platform in platforms.split(".")):
        return False
    if "abi3" in abi.split("."):
        return any(int(tag[2:]) <= max(PYTHONS) for tag in pythons.split(".") if tag[2:].isdigit())
    names = {f"cp{python}" for python in PYTHONS} | {"py3"}
    return bool(names & set(pythons.split("."))) and not abi.endswith("t")


def hashes(pin: str) -> list[str]:
    """The sha256 of the files of `name==version`, sorted."""
    name, version = pin.split("==")
    name = re.sub(r"[-_.]+", "-", name).lower()
    with urllib.request.urlopen(f"{INDEX}/{name}/", timeout=60) as answer:
        page = answer.read().decode()
    found = {
        named[1]
        for link, file in _LINK.findall(page)
        if is_of_version(file, name, version) and is_wanted(file)
        if (named := _HASH.search(unescape(link)))
    }
    if not found:
        raise SystemExit(f"{pin}: the index names no hash; use one that does (PIP_INDEX_URL)")
    return sorted(found)


def main() -> None:
    pins = [line.strip() for line in sys.stdin if "==" in line and not line.startswith("torch==")]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(hashes, pins))
    text = HEADER
    for pin, of in zip(pins, found, strict=True):
        text += " \\\n    ".join([pin, *(f"--hash=sha256:{sha}" for sha in of)]) + "\n"
    TARGET.write_text(text)


if __name__ == "__main__":
    main()
