"""Checkpoints as directories: names, atomic publication, integrity; no tensors, no process group.

    checkpoints/
      latest                      text: the name of the directory to resume from
      best                        text: the name of that with the best evaluation (--keep-best)
      step_0000012/
        metadata.json             format, step, model, layout, size and checksum of every other file
        user_state.json           what the driver wants back
        rng/rank_00000.safetensors
        model/                    Megatron-Core's own distributed checkpoint: model and optimizer
      step_0000013.incomplete/    a save that is running, or was killed
      step_0000014.set_aside/     written after the checkpoint that --resume-from went back to

A directory gets its final name in one rename, after everything in it has reached the disk. What is
named `step_<number>` is therefore complete; a killed save leaves an `.incomplete` directory.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import os
import re
import reprlib
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from plugin.errors import CheckpointError
from plugin.json_lines import read_settings

logger = logging.getLogger(__name__)

FORMAT = "megatron-tis checkpoint"
FORMAT_VERSION = 1
METADATA_FILE = "metadata.json"
USER_STATE_FILE = "user_state.json"
LATEST_FILE = "latest"
#: The file that names the checkpoint with the best evaluation.
BEST = "best"
INCOMPLETE = ".incomplete"
SET_ASIDE = ".set_aside"

#: What to do about a checkpoint that cannot be used.
USE_ANOTHER = "resume from another, --resume-from step_<number>"

_STEP_NAME = re.compile(r"step_(\d{7,})")
_BLOCK = 1 << 22
#: Characters of a marker: longer than any name of a file.
_MOST_MARKER = 1000
#: Of renameat2(2).
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@dataclass(frozen=True)
class CheckpointMetadata:
    """What `metadata.json` says about a checkpoint.

    model: the numbers of the Hugging Face config that fix the shapes
    layout: parallel sizes at the time of the save, for instance {"tp": 2, "pp": 1, ...}
    optimizer_step: updates that Adam has counted; None for a checkpoint without an optimizer
    files: [size in bytes, CRC-32] by path relative to the directory, of every file but this one
    loss_scale: state of the dynamic loss scale of float16 training; None without one
    lora: rank, alpha and targets of the adapters that it holds instead of a whole model, and the
        fingerprint of the base that they belong to; empty of a whole model
    """

    step: int
    trainer_version: int
    skipped_steps: int
    optimizer_step: int | None
    dtype: str
    model: dict[str, Any]
    layout: dict[str, int]
    software: dict[str, str] = field(default_factory=dict)
    files: dict[str, list[int]] = field(default_factory=dict)
    loss_scale: dict[str, float] | None = None
    lora: dict[str, Any] = field(default_factory=dict)


def begin(root: Path, step: int, keep_last: int | None = None) -> Path:
    """Make an empty directory for the checkpoint of `step`; also check `keep_last` for `prune`."""
    if keep_last is not None and keep_last < 1:
        raise CheckpointError(f"keep_last is {keep_last} but must be at least 1; None keeps all")
    if step < 0:
        raise CheckpointError(
            f"step is {step} but must be at least 0; pass the number of finished steps"
        )
    directory = root / f"step_{step:07d}{INCOMPLETE}"
    if directory.exists():
        logger.warning("removing %s, left behind by a save that did not finish", directory)
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    return directory


def publish(incomplete: Path) -> Path:
    """Give a finished checkpoint its final name and mark it as latest; survives a power cut."""
    final = incomplete.with_name(incomplete.name.removesuffix(INCOMPLETE))
    # The other files were synced when they were sealed.
    _sync(incomplete / METADATA_FILE)
    for path in [*incomplete.rglob("*"), incomplete, incomplete.parent]:
        if path.is_dir():
            _sync(path)
    # A run that was resumed from an earlier checkpoint comes by this step again.
    put_in_place(incomplete, final)
    _mark(final, LATEST_FILE)
    return final


def put_in_place(draft: Path, final: Path) -> None:
    """Give a directory its final name; one that has it is replaced, at once, and removed."""
    if final.exists():
        if not _exchange(draft, final):
            # Not on this file system: whoever is killed here leaves both, under other names.
            spare = final.with_name(f"{final.name}.replaced{INCOMPLETE}")
            shutil.rmtree(spare, ignore_errors=True)
            os.rename(final, spare)
            os.rename(draft, final)
            draft = spare
        _sync(final.parent)
        shutil.rmtree(draft, ignore_errors=True)
    else:
        os.rename(draft, final)
        _sync(final.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Let two directories change names in one step; False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # an old C library, or macOS
        return False
    names = os.fsencode(first), os.fsencode(second)
    return bool(renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)


def mark_best(checkpoint: Path) -> None:
    """Name `checkpoint` as the best one, which is never pruned."""
    _mark(checkpoint, BEST)


def best_checkpoint(root: Path) -> Path | None:
    """The complete checkpoint that was marked as the best one."""
    marked = _read_marker(root, BEST)
    return next((path for path in complete_checkpoints(root) if path.name == marked), None)


def _mark(checkpoint: Path, marker: str) -> None:
    target = checkpoint.with_name(marker)
    if target.is_dir():  # whoever made it: not ours to delete
        os.rename(target, target.with_name(f"{marker}.{os.urandom(4).hex()}{SET_ASIDE}"))
    draft = checkpoint.with_name(marker + INCOMPLETE)
    try:
        draft.write_text(checkpoint.name + "\n")
        _sync(draft)
        os.replace(draft, target)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    _sync(checkpoint.parent)


def prune(root: Path, keep_last: int | None) -> None:
    """Remove all but the newest `keep_last`, the latest and the best; and killed saves.

    While it is in doubt which is the best, all complete ones stay.
    """
    marked = {_read_marker(root, LATEST_FILE), _read_marker(root, BEST)}
    surplus = [] if keep_last is None else complete_checkpoints(root)[:-keep_last]
    if surplus and _best_is_in_doubt(root):
        logger.warning("%s is damaged: no checkpoint is removed", root / BEST)
        surplus = []
    for directory in [path for path in surplus if path.name not in marked] + incomplete_saves(root):
        # Renamed first: an interrupted removal must not leave half a checkpoint under a good name.
        doomed = directory
        if not directory.name.endswith(INCOMPLETE):
            doomed = directory.with_name(directory.name + ".removed" + INCOMPLETE)
            os.rename(directory, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _best_is_in_doubt(root: Path) -> bool:
    """Whether there is a marker of the best checkpoint that names none, present or set aside."""
    if not os.path.lexists(root / BEST):
        return False
    there = {path.name.removesuffix(SET_ASIDE) for path in root.glob("step_*") if path.is_dir()}
    return _read_marker(root, BEST) not in there


def complete_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints under `root`, oldest step first."""
    if not root.is_dir():
        return []
    named = [path for path in root.iterdir() if path.is_dir() and _STEP_NAME.fullmatch(path.name)]
    return sorted(named, key=step_of)


def is_checkpoint(directory: Path) -> bool:
    """Whether a directory is a checkpoint, rather than one that holds some."""
    return (directory / METADATA_FILE).exists() or bool(_STEP_NAME.fullmatch(directory.name))


def step_of(checkpoint: Path) -> int:
    """The step that a complete checkpoint is named after."""
    return int(checkpoint.name.removeprefix("step_"))


def set_aside_later(chosen: Path) -> list[Path]:
    """Rename the checkpoints after `chosen`, which becomes the latest; returns the new names."""
    _mark(chosen, LATEST_FILE)
    aside = []
    for path in complete_checkpoints(chosen.parent):
        if step_of(path) > step_of(chosen):
            aside.append(path.with_name(path.name + SET_ASIDE))
            shutil.rmtree(aside[-1], ignore_errors=True)
            os.rename(path, aside[-1])
    return aside


def remove_checkpoints(root: Path) -> None:
    """Remove all that saves have written to `root`, and `root` itself if nothing else is in it."""
    for marker in (root / LATEST_FILE, root / BEST):
        if marker.is_file():
            marker.unlink()
    set_aside = root.glob(f"step_*{SET_ASIDE}")
    for directory in [*complete_checkpoints(root), *incomplete_saves(root), *set_aside]:
        shutil.rmtree(directory)
    if root.is_dir() and not any(root.iterdir()):
        root.rmdir()


def incomplete_saves(root: Path) -> list[Path]:
    """Directories that a running or killed save has not published."""
    return sorted(path for path in root.glob(f"step_*{INCOMPLETE}") if path.is_dir())


def resolve(directory: Path) -> Path:
    """The checkpoint to load: `directory` itself, or the latest one in it.

    Warns about saves that did not finish, and about a `latest` marker that leads nowhere.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; give the path of a checkpoint")
    if directory.name.endswith(INCOMPLETE):
        raise CheckpointError(
            f"{directory} was left behind by a save that did not finish; give {directory.parent}, "
            "which holds the last complete one"
        )
    if is_checkpoint(directory):
        return directory
    complete = complete_checkpoints(directory)
    # What is left of a checkpoint that was being removed or replaced is no save.
    leftovers = [path for path in incomplete_saves(directory) if path.name.count(".") == 1]
    if not complete:
        also = f" (only {leftovers[0].name}, of a save that did not finish)" if leftovers else ""
        raise CheckpointError(
            f"{directory} holds no complete checkpoint{also}; give the `checkpoints` directory of "
            "a run or one step_<number> in it"
        )
    newest, marker = complete[-1], directory / LATEST_FILE
    marked = _read_marker(directory, LATEST_FILE)
    chosen = next((path for path in complete if path.name == marked), None)
    if chosen is None:
        message = "%s names %r, which is no complete checkpoint; taking the newest, %s"
        logger.warning(message, marker, marked, newest.name)
        chosen = newest
    elif chosen != newest:
        logger.warning(
            "%s names %s, but %s is newer and complete; resuming from the former, give the path "
            "of the latter to resume from that (--resume-from)",
            marker,
            marked,
            newest,
        )
    for leftover in leftovers:
        logger.warning(
            "%s is incomplete: its save did not finish. Resuming from %s instead; the next save "
            "removes it",
            leftover,
            chosen,
        )
    return chosen


def _read_marker(root: Path, name: str) -> str | None:
    marker = root / name
    if not marker.is_file():
        return None
    with marker.open(errors="replace") as file:
        return file.read(_MOST_MARKER).strip()  # whatever takes its place may have no end


def write_json(path: Path, content: Any) -> None:
    """Write `content` so that reading gives it back unchanged; anything else is refused."""
    try:
        text = json.dumps(content, allow_nan=False, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path.name} cannot hold this value: {error}; use dicts with string keys, lists, "
            "strings, finite numbers, booleans and None"
        ) from None
    if json.loads(text) != content:
        raise CheckpointError(
            f"{path.name} would not be read back as written (tuples become lists, keys become "
            "strings); use lists and string keys"
        )
    path.write_text(text + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint."""
    try:
        content = json.loads(read_settings(path))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} has no {path.name}, so it is not a checkpoint of this software, or "
            f"files were removed; {USE_ANOTHER}"
        ) from None
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); {USE_ANOTHER}") from None
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise CheckpointError(f"{path} holds a {kind} instead of an object; {USE_ANOTHER}")
    return content


def write_metadata(directory: Path, metadata: CheckpointMetadata) -> None:
    """Write `metadata.json`, the last file of a checkpoint."""
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(metadata)}
    write_json(directory / METADATA_FILE, content)


def read_metadata(directory: Path) -> CheckpointMetadata:
    """`metadata.json` of a checkpoint; refuses other formats and versions."""
    path = directory / METADATA_FILE
    content = read_json(path)
    found = content.pop("format", None)
    if found != FORMAT:
        raise CheckpointError(
            f"{path} has format {reprlib.repr(found)} instead of {FORMAT!r}: another program wrote "
            f"{directory}; convert it to a Hugging Face directory and start from that with "
            "--hf-checkpoint"
        )
    version = content.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {reprlib.repr(version)}; this release reads version "
            f"{FORMAT_VERSION}; use the release that wrote it "
            f"({reprlib.repr(content.get('software'))})"
        )
    content.setdefault("loss_scale", None)  # added after the first checkpoints of this version
    content.setdefault("lora", {})  # written before there were adapters
    expected = {entry.name for entry in fields(CheckpointMetadata)}
    if set(content) != expected:
        differing = reprlib.repr(sorted(set(content) ^ expected))
        raise CheckpointError(
            f"{path} should have exactly the keys {sorted(expected)} but differs in {differing}; "
            f"{USE_ANOTHER}"
        )
    metadata = CheckpointMetadata(**content)
    for entry in fields(CheckpointMetadata):
        value = getattr(metadata, entry.name)
        if not _VALID[str(entry.type)](value):
            raise CheckpointError(
                f"{path} has {entry.name} {reprlib.repr(value)}; expected {entry.type}; "
                f"{USE_ANOTHER}"
            )
    strange = [name for name, seal in metadata.files.items() if not _is_seal(name, seal)]
    if strange:
        raise CheckpointError(
            f"{path} has among its files {reprlib.repr(strange[0])}: "
            f"{reprlib.repr(metadata.files[strange[0]])}; expected the path of a file in the "
            f"checkpoint with its size and checksum; {USE_ANOTHER}"
        )
    return metadata


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_loss_scale(value: Any) -> bool:
    numbers = {"scale", "growth_tracker", "hysteresis_tracker"}
    if not isinstance(value, dict) or set(value) != numbers:
        return False
    plain = all(type(number) in (int, float) and math.isfinite(number) for number in value.values())
    return plain and value["scale"] > 0


#: By the type of a field of `CheckpointMetadata`.
_VALID: dict[str, Callable[[Any], bool]] = {
    "int": _is_count,
    "int | None": lambda value: value is None or _is_count(value),
    "str": lambda value: isinstance(value, str),
    "dict[str, float] | None": lambda value: value is None or _is_loss_scale(value),
    "dict[str, Any]": lambda value: isinstance(value, dict),
    "dict[str, int]": lambda value: isinstance(value, dict) and all(map(_is_count, value.values())),
    "dict[str, str]": lambda value: (
        isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
    ),
    "dict[str, list[int]]": lambda value: isinstance(value, dict),
}


def _is_seal(name: str, seal: Any) -> bool:
    """Whether a file of the metadata is inside the checkpoint and has [size, CRC-32]."""
    inside = name.isprintable() and len(name) < 1000 and not name.startswith("/")
    is_pair = isinstance(seal, list) and len(seal) == 2 and all(map(_is_count, seal))
    return inside and ".." not in name.split("/") and is_pair


def seal_files(directory: Path, names: Iterable[str]) -> dict[str, list[int]]:
    """Force files to disk; [size, CRC-32] of each."""
    sealed = {}
    for name in names:
        _sync(directory / name)
        sealed[name] = list(_size_and_checksum(directory / name))
    return sealed


def check_files(directory: Path, recorded: Mapping[str, list[int]], names: Iterable[str]) -> None:
    """Compare some of a checkpoint's files with what `metadata.json` recorded about them."""
    for name in names:
        path = directory / name
        size, checksum = recorded[name]
        try:
            found = path.stat().st_size if path.is_file() else None
        except OSError:  # a name that no file can have
            found = None
        if found is None:
            problem = "is missing"
        elif found != size:
            problem = f"has {found} bytes instead of {size}: it was cut off or overwritten"
        elif _size_and_checksum(path)[1] != checksum:
            problem = "has other content than when it was saved (CRC-32 differs)"
        else:
            continue
        raise CheckpointError(
            f"{path} {problem}, so the checkpoint cannot be used; copy it again or {USE_ANOTHER}"
        )


def _size_and_checksum(path: Path) -> tuple[int, int]:
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return size, checksum


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
