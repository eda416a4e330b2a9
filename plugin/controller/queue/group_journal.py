"""Finished groups on disk, so that a resumed run trains on them instead of generating them again.

    groups.0000012.journal   a line of JSON, then one record per group, as they were scored

A record is complete or it is not used: a checksum covers it, and reading a file ends at the first
record that is cut off. Files are only ever appended to by the process that made them; a resumed run
begins a new one. Each batch that is taken begins the next file, and only the newest files are kept:
the groups of the others are too old to be trained on.

Nothing is removed because it was trained on: that counts once a checkpoint has it, and the
checkpoint knows the numbers of the prompts it was trained on (see `RolloutQueue.restore`).

Records are not forced to disk. They survive the death of every process; what a machine that stops
had not written yet is generated again.
"""

from __future__ import annotations

import contextlib
import json
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from plugin.cluster.array_transport import Arrays, from_arrays, to_arrays
from plugin.controller.queue.groups import Attempt, Group
from plugin.environments.trajectory import Rollouts
from plugin.observe.run_files import JOURNAL_FILES

_FORMAT = 1
#: Of a record: magic, bytes of its header and of its arrays, CRC-32 of both.
_PREFIX = struct.Struct("<4sIQI")
_MAGIC = b"grp1"


class GroupJournal:
    """The journal of one run directory.

    key: of everything that a group follows from besides its prompt's number; groups of a run with
        another key are not read
    files: how many are kept
    warn: says once that the journal cannot be written, which ends it and not the training
    proven: whether every engine has shown that it computes with the trainer's weights; groups wait
        in memory until it is true
    """

    def __init__(
        self,
        run_dir: Path,
        key: str,
        files: int,
        warn: Callable[[str], None],
        proven: Callable[[], bool] = lambda: True,
    ) -> None:
        self._run_dir, self._key, self._most, self._warn = run_dir, key, files, warn
        self._proven = proven
        self._open: FileIO | None = None
        self._waiting: deque[tuple[int, Group]] = deque()  # with the batch before which they came
        self._batches = 0
        self._works = True

    def add(self, group: Group) -> None:
        """Write a scored group, as soon as the engines are proven."""
        if group.rollouts.batch.stored:
            # Their values end with the engines that have them, and are too heavy for the driver.
            self._give_up(f"the engines keep {', '.join(group.rollouts.batch.stored)}")
        if not self._works:
            return
        self._waiting.append((self._batches, group))
        self.write()

    def write(self) -> None:
        """Write the groups that wait until engines are proven, if these are now."""
        with self._giving_up_on_errors():
            while self._works and self._waiting and self._proven():
                self._append(record(self._waiting.popleft()[1]))

    def begin_batch(self) -> None:
        """Begin the next file, and remove those that are not among the newest."""
        self.write()
        self._batches += 1
        while self._waiting and self._waiting[0][0] <= self._batches - self._most:
            self._waiting.popleft()
        with self._giving_up_on_errors():
            self._close()
            for path in self.paths()[: -self._most]:
                path.unlink(missing_ok=True)

    def read(self) -> list[Group]:
        """The groups of the run so far, of each prompt the last one."""
        found: dict[int, Group] = {}
        with self._giving_up_on_errors():
            files = self.paths()
            for path in files:
                found |= {group.index: group for group in read_file(path, self._key)}
            if files and not found:
                self._warn(
                    f"the finished groups in {self._run_dir} are not used: they were made with "
                    "different settings or are incomplete; their prompts are sampled again"
                )
        return list(found.values())

    def replace(self, groups: Sequence[Group]) -> None:
        """Hold these groups, of proven engines, and no others."""
        self._waiting.clear()
        with self._giving_up_on_errors():
            earlier = self.paths()
            self._close()
            # Until all are written the earlier ones stay, too: of a prompt the last record counts.
            for group in groups if self._works else ():
                self._append(record(group))
            for path in earlier:
                path.unlink(missing_ok=True)

    def paths(self) -> list[Path]:
        """Its files, the oldest first."""
        return journal_files(self._run_dir)

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _append(self, content: bytes) -> None:
        if self._open is None:
            numbers = [int(path.name.split(".")[1]) for path in self.paths()]
            path = self._run_dir / f"groups.{max(numbers, default=0) + 1:07d}.journal"
            self._open = path.open("xb", buffering=0)
            first = {"format": _FORMAT, "key": self._key}
            content = json.dumps(first).encode() + b"\n" + content
        before = self._open.tell()
        try:
            while content:
                content = content[self._open.write(content) :]
        except OSError:
            self._open.truncate(before)
            raise

    @contextlib.contextmanager
    def _giving_up_on_errors(self) -> Iterator[None]:
        """End the journal, and not the training, on a disk that fails."""
        try:
            yield
        except OSError as error:
            self._give_up(f"{self._run_dir} cannot be written ({error.strerror})")

    def _give_up(self, why: str) -> None:
        if self._works:
            self._warn(
                f"finished groups are no longer written to the run directory: {why}; a resumed "
                "run samples again what had not been trained on"
            )
        self._works = False
        self._waiting.clear()


def journal_files(run_dir: Path) -> list[Path]:
    """The files of the journal in a run directory, the oldest first."""
    return sorted(run_dir.glob(JOURNAL_FILES))


def remove_journal(run_dir: Path) -> None:
    """Remove what an earlier part of the run, or another run, left."""
    for path in journal_files(run_dir):
        path.unlink(missing_ok=True)


def record(group: Group) -> bytes:
    """A group as one record."""
    attempt, place = group.attempt, np.arange(group.place.start, group.place.stop)
    rollouts = group.rollouts.select(place, np.full(len(place), attempt.index))
    arrays = to_arrays(rollouts) | {f"//{name}": part for name, part in group.parts.items()}
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    header = {
        "index": attempt.index,
        "failures": attempt.failures,
        "sent_with": [[mate.index, mate.failures] for mate in attempt.sent_with],
        "arrays": [[name, a.dtype.str, list(a.shape)] for name, a in arrays.items()],
    }
    head = json.dumps(header).encode()
    body = b"".join([head, *(a.reshape(-1).view(np.uint8).data for a in arrays.values())])
    prefix = _PREFIX.pack(_MAGIC, len(head), len(body) - len(head), zlib.crc32(body))
    return prefix + body


def read_file(path: Path, key: str) -> Iterator[Group]:
    """The groups of a file up to the first record that is not whole; none of another key."""
    content = path.read_bytes()
    first, end, rest = content.partition(b"\n")
    if not end or _first_line(first) != {"format": _FORMAT, "key": key}:
        return
    place = len(content) - len(rest)
    while len(content) - place >= _PREFIX.size:
        magic, of_head, of_arrays, checksum = _PREFIX.unpack_from(content, place)
        place += _PREFIX.size
        body = memoryview(content)[place : place + of_head + of_arrays]
        whole = len(body) == of_head + of_arrays and zlib.crc32(body) == checksum
        if magic != _MAGIC or not whole:
            return
        yield _group_of(json.loads(bytes(body[:of_head])), body[of_head:])
        place += len(body)


def _first_line(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _group_of(header: dict[str, Any], values: memoryview) -> Group:
    arrays: Arrays = {}
    place = 0
    for name, dtype, shape in header["arrays"]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        # A copy: what begins at any byte is not aligned.
        arrays[name] = np.frombuffer(values[place : place + size], dtype).reshape(shape).copy()
        place += size
    parts = {name[2:]: array for name, array in arrays.items() if name.startswith("//")}
    columns = {name: array for name, array in arrays.items() if not name.startswith("//")}
    rollouts = from_arrays(Rollouts, columns)
    mates = tuple(Attempt(index, failures) for index, failures in header["sent_with"])
    attempt = Attempt(header["index"], header["failures"], sent_with=mates)
    return Group(attempt, rollouts, slice(0, len(rollouts)), parts)
