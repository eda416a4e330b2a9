"""What the members of a weight group have in common, whichever way the weights go.

A sender meets the others, announces one bucket after the other and says how it gets across; a
receiver meets them and takes what is announced.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from plugin.weights.store import (
    BUCKET_BYTES,
    MeetingPoint,
    NamedTensors,
    TensorNote,
    WeightGroup,
)


class _Member(ABC):
    """One process's place in a group, which it has joined."""

    def __init__(self, group: WeightGroup) -> None:
        self._point = MeetingPoint(group)
        self._point.meet("joined")

    @property
    def group(self) -> WeightGroup:
        """The group that it is a member of."""
        return self._point.group

    def meet(self, version: int) -> None:
        """Wait until every member is ready for `version`."""
        self._point.meet(f"version {version}")

    @abstractmethod
    def close(self, *, in_the_middle: bool = False) -> None:
        """Leave the group; `in_the_middle` of an operation, without waiting for it."""


class Sender(_Member):
    """The end of a group at a trainer's rank; `number` is what it announces under.

    takes_turns: receivers take this sender and others in turns, and so need the end of each round
    """

    takes_turns = True

    def __init__(self, group: WeightGroup, number: int) -> None:
        super().__init__(group)
        self._number = number

    def send(
        self,
        version: int,
        part: Iterable[tuple[str, Tensor] | None],
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> tuple[int, int]:
        """Send this rank's part of `version`; how many bytes and messages.

        part: tensors by name; None ends a round of turns
        """
        self.meet(version)
        total, messages = 0, 0
        try:
            for bucket in _in_buckets(part, bucket_bytes):
                if not bucket and not self.takes_turns:
                    continue
                notes = TensorNote.of(bucket)
                self._pass_on(version, messages, bucket, notes)
                total += sum(note.nbytes for note in notes)
                messages += 1
        finally:
            self._end_version()
        self._point.announce(version, self._number, messages, None)
        return total, messages + 1

    @abstractmethod
    def _pass_on(
        self, version: int, number: int, bucket: NamedTensors, notes: list[TensorNote]
    ) -> None:
        """Announce a bucket as message `number` and get it to the receivers."""

    def _end_version(self) -> None:
        """Give up what was needed to send a version, whole or not."""


class Receiver(_Member):
    """The end of a group at a worker of an engine."""

    @abstractmethod
    def receive(self, version: int, take: Callable[[NamedTensors], None]) -> None:
        """Hand every bucket of `version` to `take`, after `meet`."""


class Membership:
    """The sender or receiver of a process: kept from version to version, made anew for a new group.

    After an error it has left its group.
    """

    def __init__(self) -> None:
        self._member: Any = None

    @contextmanager
    def of(self, group: WeightGroup, join: Callable[[], Any]) -> Iterator[Any]:
        """The member of `group`, made by `join` if there is none yet."""
        try:
            if self._member is None or self._member.group != group:
                self.leave()
                self._member = join()
            yield self._member
        except BaseException:
            self.leave(in_the_middle=True)
            raise

    def leave(self, *, in_the_middle: bool = False) -> None:
        """Leave the group, if any."""
        if self._member is not None:
            self._member.close(in_the_middle=in_the_middle)
            self._member = None


def _in_buckets(
    part: Iterable[tuple[str, Tensor] | None], bucket_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Tensors in lists of at most `bucket_bytes`, or of one; an empty list ends a round."""
    held: list[tuple[str, Tensor]] = []
    size = 0
    for entry in part:
        if held and (entry is None or size + entry[1].nbytes > bucket_bytes):
            yield held
            held, size = [], 0
        if entry is None:
            yield []
        else:
            held.append((entry[0], entry[1].detach().contiguous()))
            size += entry[1].nbytes
    if held:
        yield held
