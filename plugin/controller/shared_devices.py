"""Trainer and engines on the same devices: whose turn it is, and how it changes (`--colocate`).

      training --send--> sending --sent--> generating --train--> training

A step that fails leaves `moving`, from where the only way leads back to `training`: every step can
be made twice. So a lost engine, an offload that fails and Ctrl-C leave a job that can go on, or at
least save its weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import StrEnum

from plugin.cluster.engine_pool import EnginePool
from plugin.cluster.trainer_group import TrainerGroup
from plugin.errors import ParallelError
from plugin.megatron_backend.offloading import ALL_PARTS


class Turn(StrEnum):
    """Who has the devices."""

    TRAINING = "training"
    SENDING = "sending"
    GENERATING = "generating"
    MOVING = "moving"


_ALLOWED = {
    Turn.TRAINING: {Turn.SENDING, Turn.TRAINING},
    Turn.SENDING: {Turn.GENERATING, Turn.TRAINING},
    Turn.GENERATING: {Turn.TRAINING},
    Turn.MOVING: {Turn.TRAINING},
}


class SharedDevices:
    """Moves the devices between the trainer and the engines; begins with the trainer's turn.

    An engine that dies during a move is replaced by one that is awake.
    """

    def __init__(self, trainer: TrainerGroup, engines: EnginePool, level: int) -> None:
        self._trainer, self._engines, self._level = trainer, engines, level
        self.turn = Turn.TRAINING

    def train(self) -> None:
        """The trainer's turn: engines sleep, then the trainer gets its memory back."""
        if self.turn is Turn.TRAINING:
            return
        with self._moving_to(Turn.TRAINING):
            self._engines.sleep(self._level)
            self._trainer.onload(ALL_PARTS[::-1])

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Send the weights inside; then it is the engines' turn.

        Both sides hold their weights inside, and nothing else.
        """
        self.train()
        with self._moving_to(Turn.SENDING):
            self._trainer.offload(("gradients", "optimizer"))
            self._engines.wake("weights")
        yield
        with self._moving_to(Turn.GENERATING):
            self._trainer.offload(("weights",))
            self._engines.wake("cache")

    @contextlib.contextmanager
    def restarting(self) -> Iterator[None]:
        """Restart the trainer inside, with all its memory."""
        self.turn = Turn.MOVING
        with self._moving_to(Turn.TRAINING):
            self._engines.sleep(self._level)
            yield

    @contextlib.contextmanager
    def _moving_to(self, turn: Turn) -> Iterator[None]:
        if turn not in _ALLOWED[self.turn]:
            raise ParallelError(f"the devices cannot go from {self.turn} to {turn}")
        self.turn = Turn.MOVING
        yield
        self.turn = turn


class OwnDevices:
    """Stands in for `SharedDevices` without --colocate: nothing moves."""

    turn = Turn.GENERATING

    def train(self) -> None:
        """Nothing to do."""

    def sending(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to do."""
        return contextlib.nullcontext()

    restarting = sending
