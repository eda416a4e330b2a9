"""Engines that give their devices to the trainer while it trains, with `--colocate`.

A sleeping engine has no weights that it could answer for: it refuses to generate until it is awake
and has been sent a version.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol

from torch import Tensor, nn

from plugin.host_storage import HostStorage

#: The weights wake first, so that new ones can be sent while the trainer still has its own.
EnginePart = Literal["weights", "cache"]


class SleepingEngine(Protocol):
    """What a `RolloutEngine` has besides if it can share its devices. No call does harm twice."""

    def sleep(self, level: int) -> None:
        """Give up the device's memory; nothing is being generated.

        level: 1 = the weights wait in host memory; 2 = they are thrown away, buffers are kept
        """
        ...

    def wake(self, part: EnginePart) -> None:
        """Take memory for `part` again."""
        ...


class SleepingModel:
    """The memory of a module that sleeps and wakes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept = HostStorage(self._all)
        self._buffers = HostStorage(self._all_buffers)
        self._dropped = HostStorage(self._parameters, keeps_values=False)

    def sleep(self, level: int) -> None:
        """Give up parameters and buffers."""
        if self._kept.is_parked or self._dropped.is_parked:
            return
        if level == 1:
            self._kept.park()
        else:
            # Buffers first: where one shares its memory with a parameter its values are kept.
            self._buffers.park()
            self._dropped.park()

    def wake(self) -> None:
        """Take their memory again; after level 2 the parameters are 0."""
        for storage in (self._kept, self._dropped, self._buffers):
            storage.restore()

    def _parameters(self) -> Iterator[Tensor]:
        return self._model.parameters()

    def _all_buffers(self) -> Iterator[Tensor]:
        return self._model.buffers()

    def _all(self) -> Iterator[Tensor]:
        yield from self._model.parameters()
        yield from self._model.buffers()
